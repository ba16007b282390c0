"""What finished legs teach: times of workers and of transfers between nodes."""

import msgspec

from controlplane.core.routing import Priced, Source
from controlplane.gateway.cluster import Cluster
from controlplane.gateway.legs import PrefillReply
from controlplane.gateway.running import Running
from controlplane.gateway.stats import Stats
from controlplane.gateway.wire import Leg
from controlplane.gateway.worker_state import WorkerState

WELL_KNOWN = 8
"""Samples after which a worker's prefill times can be told from what a transfer took."""


def expect(run: Running, node_id: str) -> None:
    """Leg 1 is on its way there, and its blocks will be."""
    keys = run.plan.held.keys
    if keys:
        run.context.cluster.expected.start(run.asked.request_id, node_id, keys)


class PrefillLesson(msgspec.Struct, gc=False):
    """What is needed to learn from a leg 1 when its worker has reported, which may be a second after
    the request has gone: this holds nothing of the request. `seconds` None: unknown, nothing to learn
    from. `prompt_tokens` and `cached_tokens`: as the answer said, or else as it was planned."""

    cluster: Cluster
    stats: Stats
    worker: WorkerState
    source: Source | None
    transfer_seconds: float
    own_prefix_tokens: int
    seconds: float | None
    prompt_tokens: int | None
    cached_tokens: int

    def take(self, computed: int, cached: int) -> None:
        """Leg 1 computed and found so many tokens. Where some came from another node, what it took
        beyond a prefill's own time was the transfer."""
        seconds, worker, source = self.seconds, self.worker, self.source
        if seconds is None:
            return
        moved = cached - self.own_prefix_tokens
        if not self.transfer_seconds or source is None or moved <= 0:
            worker.prefilled(computed, cached, seconds)
        elif worker.prefill_times.num_samples >= WELL_KNOWN:
            rest = seconds - worker.prefill_times.predict(computed, cached)
            took = max(0.0, rest)
            self.stats.transfer_calibration.observe(self.transfer_seconds, took)
            self.cluster.paths.moved(source.node_id, worker.row.node_id, moved, took)

    def take_report(self, leg: Leg | None) -> None:
        """The same from the worker's report; from what the answer said where none came."""
        if leg is not None:
            self.take(leg.computed_tokens, leg.device_hit_tokens + leg.pool_hit_tokens)
        elif self.prompt_tokens is not None:
            cached = min(self.cached_tokens, self.prompt_tokens)
            self.take(self.prompt_tokens - cached, cached)


def prefill_lesson(
    run: Running, worker: WorkerState, priced: Priced, reply: PrefillReply, seconds: float | None
) -> PrefillLesson:
    """Of this request's leg 1 on `worker`."""
    context, cached = run.context, reply.cached_tokens
    total = reply.prompt_tokens or run.decision.prompt_tokens
    return PrefillLesson(
        context.cluster, context.stats, worker, run.plan.source, priced.transfer_seconds,
        priced.option.own_prefix_tokens, seconds, total,
        priced.used_prefix_tokens if cached is None else cached,
    )  # fmt: skip


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
