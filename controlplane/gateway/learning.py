"""What finished legs teach: times of workers and of transfers between nodes."""

from controlplane.core.routing import Priced
from controlplane.gateway.cluster import WorkerState
from controlplane.gateway.running import Running

WELL_KNOWN = 8
"""Samples after which a worker's prefill times can be told from what a transfer took."""


def expect(run: Running, node_id: str) -> None:
    """Leg 1 is on its way there, and its blocks will be."""
    keys = run.plan.held.keys
    if keys:
        run.context.cluster.expected.start(run.asked.request_id, node_id, keys)


def take_prefill(
    run: Running, worker: WorkerState, priced: Priced, computed: int, cached: int,
    seconds: float | None,
) -> None:  # fmt: skip
    """Leg 1 computed and found so many tokens. Where some came from another node, what it took
    beyond a prefill's own time was the transfer. `seconds` None: unknown, nothing to learn from."""
    if seconds is None:
        return
    source = run.plan.source
    moved = cached - priced.option.own_prefix_tokens
    if not priced.transfer_seconds or source is None or moved <= 0:
        worker.prefilled(computed, cached, seconds)
    elif worker.prefill_times.num_samples >= WELL_KNOWN:
        rest = seconds - worker.prefill_times.predict(computed, cached)
        took = max(0.0, rest)
        run.context.stats.transfer_calibration.observe(priced.transfer_seconds, took)
        paths = run.context.cluster.paths
        paths.moved(source.node_id, worker.row.node_id, moved, took)


def take_handover(run: Running, worker: WorkerState, seconds: float) -> None:
    """From leg 1's answer to leg 2's first byte; of a stream that had a leg 1."""
    decision, cluster = run.decision, run.context.cluster
    first = cluster.workers.get(decision.prefill_worker)
    tokens = decision.engine_prompt_tokens or decision.prompt_tokens
    if first is None or tokens is None:
        return
    source, node_id = first.row.node_id, worker.row.node_id
    path = cluster.paths.costs.get(source, {}).get(node_id)
    worker.handed_over(source, tokens, seconds, path)


def take_decode(run: Running, worker: WorkerState, tbt_seconds: float) -> None:
    """A stream's mean time between pieces, beside what runs there as it ends."""
    slots, name = run.context.cluster.slots, worker.row.id
    beside = slots.beside(name)
    running, kv_tokens = slots.running(name) + beside.slots, slots.kv_tokens(name)
    worker.decoded(running, tbt_seconds, kv_tokens + beside.kv_tokens)
