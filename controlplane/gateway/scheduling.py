"""From a request to a plan: prefixes, prices, admission. The rules are in controlplane.core."""

from array import array
from collections.abc import Sequence
from time import monotonic

import msgspec

from controlplane.core.admission import Admission, Predicted, Standing
from controlplane.core.fairness import QueuedLeg
from controlplane.core.routing import (
    DecodeOption,
    PrefillOption,
    Priced,
    Source,
    order_by_cost,
    order_by_turn,
    order_decode,
)
from controlplane.gateway.cluster import Cluster, Policies, WorkerState
from workers.core.hashing import block_hashes, root_hash

UNKNOWN_PROMPT_TOKENS = 512
"""Assumed for prices where a prompt's tokens cannot be known."""


_NOBODY = Standing()


class Plan(msgspec.Struct):
    """Candidates in order, and what the first pair should give."""

    policies: Policies
    prefill: list[Priced]
    by_turn: bool
    decode: list[DecodeOption]
    free_decode: list[DecodeOption]
    admission: Admission
    predicted_ttft_seconds: float | None
    predicted_handover_seconds: float | None
    slot_wait_seconds: float = 0.0
    source: Source | None = None  # of the transfers that are priced in
    held_blocks: dict[str, int] = {}  # node -> blocks of the prompt
    standing: Standing = Standing()
    predicted_tbt_seconds: float | None = None


class Scheduler:
    """Plans requests against the cluster as of now. Nothing is held by planning."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._turn = 0

    def plan(
        self,
        model: str,
        prompts: Sequence[Sequence[int]] | None,
        salt: str | None,
        now: float,
        standing: Standing = _NOBODY,
    ) -> Plan:
        """`prompts` None: tokens unknown; then no prefix counts and prices assume a length."""
        cluster = self._cluster
        policies = cluster.policies(model).of(standing)
        prefill_workers = cluster.serving(model, "prefill", now)
        decode_workers = cluster.serving(model, "decode", now)
        num_tokens = UNKNOWN_PROMPT_TOKENS if prompts is None else sum(map(len, prompts))
        held = self._held(prefill_workers or decode_workers, prompts, salt)
        options = [
            self._prefill_option(state, held, num_tokens, now, standing)
            for state in prefill_workers
        ]
        by_turn = policies.scheduling.placement == "round_robin"
        source: Source | None = None
        if by_turn:
            ordered = order_by_turn(options, num_tokens, self._turn)
            self._turn += 1
        else:
            threshold = policies.scheduling.balancing_threshold
            source = self._source(held)
            ordered = order_by_cost(options, num_tokens, threshold, source)
        first = ordered[0] if ordered else None
        decode = [self._decode_option(state, first, num_tokens) for state in decode_workers]
        free = order_decode(decode)
        plan = Plan(policies, ordered, by_turn, decode, free, Admission(admitted=True), None, None)
        plan.source, plan.standing = source, standing
        plan.held_blocks = {node: blocks for node, (blocks, _) in held.items()}
        self._predict(plan, num_tokens, model, now)
        return plan

    def _source(self, held: dict[str, tuple[int, int]]) -> Source | None:
        """The node that holds most, where blocks can be brought from it at all."""
        if not self._cluster.paths.costs or not held:
            return None
        node_id = max(held, key=lambda node: held[node][1])
        tokens, costs = held[node_id][1], self._cluster.paths.costs.get(node_id)
        return Source(node_id, tokens, costs) if tokens and costs else None

    def choose_decode(self, plan: Plan, model: str, num_tokens: int | None) -> None:
        """Anew, after a wait."""
        first = plan.prefill[0] if plan.prefill else None
        workers = self._cluster.serving(model, "decode", monotonic())
        plan.decode = [self._decode_option(state, first, num_tokens or 0) for state in workers]
        plan.free_decode = order_decode(plan.decode)

    def decode_options(self, model: str, now: float) -> list[DecodeOption]:
        """Decode workers as of now, for another try."""
        return [self._decode_option(s) for s in self._cluster.serving(model, "decode", now)]

    def _held(
        self, workers: list[WorkerState], prompts: Sequence[Sequence[int]] | None, salt: str | None
    ) -> dict[str, tuple[int, int]]:
        """For each node: blocks and tokens that it holds of the prompts, from their heads."""
        held: dict[str, tuple[int, int]] = {}
        if not prompts or not self._cluster.index.nodes():
            return held
        for namespace, block_tokens in _namespaces(workers):
            root = root_hash(namespace, salt, None)
            for tokens in prompts:
                if len(tokens) < block_tokens or not _are_int32(tokens):
                    continue
                hashes = block_hashes(root, tokens, block_tokens)
                lengths = self._cluster.index.held_lengths(namespace, hashes)
                for node, blocks in lengths.items():
                    before = held.get(node, (0, 0))
                    usable = min(blocks * block_tokens, len(tokens) - 1)
                    held[node] = (before[0] + blocks, before[1] + usable)
        return held

    def _prefill_option(
        self,
        state: WorkerState,
        held: dict[str, tuple[int, int]],
        num_tokens: int,
        now: float,
        standing: Standing,
    ) -> PrefillOption:
        row = state.row
        own = min(held.get(row.node_id, (0, 0))[1], num_tokens)
        return PrefillOption(
            worker_id=row.id,
            node_id=row.node_id,
            own_prefix_tokens=own,
            queue_seconds=state.prefill_queue.wait_seconds(now)
            + self._ahead(state, own, num_tokens, standing),
            running=len(state.prefill_queue),
            times=state.prefill_times,
        )

    def _ahead(self, state: WorkerState, own: int, num_tokens: int, standing: Standing) -> float:
        """Predicted seconds of those that wait here for the worker and go first."""
        dispatch, row = self._cluster.dispatch, state.row
        if not dispatch.waiting(row.id):
            return 0.0
        seconds = state.prefill_times.predict(num_tokens - own, own)
        share = self._cluster.policies(row.model).admission.hit_min_share
        hit = own > 0 and own >= share * num_tokens
        leg = QueuedLeg("", num_tokens - own, seconds, standing.rank, hit, standing.tenant)
        return dispatch.ahead_seconds(row.id, leg)

    def _decode_option(
        self, state: WorkerState, first: Priced | None = None, num_tokens: int = 0
    ) -> DecodeOption:
        row = state.row
        running = self._cluster.slots.running(row.id)
        tbt = (
            state.decode_times.predict_tbt(running + 1) if state.decode_times.num_samples else None
        )
        handover = self._handover(state, first, num_tokens)
        cap = self._cluster.decode_cap(row)
        return DecodeOption(row.id, row.node_id, running, cap, tbt, handover)

    def _handover(self, state: WorkerState, first: Priced | None, num_tokens: int) -> float:
        """Seconds to bring the prompt's KV to a decode worker; without a path, to compute it."""
        if first is None or first.option.node_id == state.row.node_id:
            return 0.0
        cost = self._cluster.paths.costs.get(first.option.node_id, {}).get(state.row.node_id)
        if cost is None:
            return state.prefill_times.predict(num_tokens, 0)
        return cost.seconds(num_tokens)

    def _predict(self, plan: Plan, num_tokens: int, model: str, now: float) -> None:
        """Fill in what the first pair should give, and whether that keeps the SLO."""
        options = plan.free_decode or plan.decode
        best = options[0] if options else None
        times = self._cluster.workers[best.worker_id].decode_times if best is not None else None
        handover = times.predict_handover() if times is not None else None
        if plan.prefill:
            first = plan.prefill[0]
            ttft, wait = first.ttft_seconds, first.option.queue_seconds
        elif best is not None:  # decode-side prefill
            worker = self._cluster.workers[best.worker_id]
            ttft, wait = worker.prefill_times.predict(num_tokens, 0), 0.0
        else:
            return
        if plan.decode and not plan.free_decode:
            plan.slot_wait_seconds = self._slot_wait(plan, model)
        plan.predicted_handover_seconds = handover
        moved = best.handover_seconds if best is not None and plan.prefill else 0.0
        plan.predicted_ttft_seconds = ttft + plan.slot_wait_seconds + (handover or 0.0) + moved
        wait += plan.slot_wait_seconds
        tbt = plan.predicted_tbt_seconds = best.predicted_tbt_seconds if best is not None else None
        predicted = Predicted(plan.predicted_ttft_seconds, wait, tbt)
        slo, rules = plan.policies.slo, plan.policies.admission
        desk = self._cluster.desk
        plan.admission = desk.judge(slo, rules, model, plan.standing, predicted, now)

    def _slot_wait(self, plan: Plan, model: str) -> float:
        """Those ahead and this one, served by all slots at the mean service time."""
        services = [
            seconds
            for option in plan.decode
            if (seconds := self._cluster.workers[option.worker_id].decode_times.predict_service())
        ]
        num_slots = sum(option.cap for option in plan.decode)
        if not services or not num_slots:
            return 0.0
        ahead = self._cluster.slots.waiting(model) + 1
        return ahead * (sum(services) / len(services)) / num_slots


def _are_int32(tokens: Sequence[int]) -> bool:
    """Ours are; a client's own ids need not be."""
    return isinstance(tokens, array) or (min(tokens) >= 0 and max(tokens) < 2**31)


def _namespaces(workers: list[WorkerState]) -> set[tuple[bytes, int]]:
    return {
        (state.namespace, state.block_tokens)
        for state in workers
        if state.namespace is not None and state.block_tokens
    }
