"""From a request to a plan: prefixes, prices, admission. The rules are in controlplane.core."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic

import msgspec

from controlplane.core.admission import ADMITTED, Admission, Predicted, Standing
from controlplane.core.fairness import QueuedLeg
from controlplane.core.handshake import pairs
from controlplane.core.placement import Algorithm, Placing, Rules, place, shared_tokens
from controlplane.core.routing import (
    DecodeOption,
    PrefillOption,
    Priced,
    Source,
    order_decode,
)
from controlplane.core.text_keys import TextPrompt
from controlplane.core.turns import UnevenTurns
from controlplane.gateway.chains import KnownChains
from controlplane.gateway.cluster import Cluster
from controlplane.gateway.policies import Policies
from controlplane.gateway.wire import ObservedPlacement
from controlplane.gateway.worker_state import WorkerState
from workers.core.ids import BlockHash

UNKNOWN_PROMPT_TOKENS = 512
"""Assumed for prices where a prompt's tokens cannot be known."""

_NOBODY = Standing()


class Held(msgspec.Struct, eq=False):
    """Of a request's prompts, by node. `coming`: tokens that will be there when the legs on their
    way have run. `keys`: the block keys of its only prompt, in `namespace`."""

    blocks: dict[str, int] = {}
    tokens: dict[str, int] = {}
    coming: dict[str, int] = {}
    namespace: bytes = b""
    block_tokens: int = 0
    keys: Sequence[BlockHash] = ()

    def usable(self, node_id: str) -> int:
        return max(self.tokens.get(node_id, 0), self.coming.get(node_id, 0))


NOTHING_HELD = Held()


@dataclass(slots=True)
class Plan:
    """Candidates in order, and what the first pair should give."""

    policies: Policies
    prefill: list[Priced]
    by_turn: bool  # the order is not by cost
    decode: list[DecodeOption]
    free_decode: list[DecodeOption]
    admission: Admission = ADMITTED
    predicted_ttft_seconds: float | None = None
    predicted_handover_seconds: float | None = None
    slot_wait_seconds: float = 0.0
    source: Source | None = None  # of the transfers that are priced in
    held_blocks: dict[str, int] = field(default_factory=dict)  # node -> blocks of the prompt
    standing: Standing = _NOBODY
    predicted_tbt_seconds: float | None = None
    turn_seconds: float = 0.0  # of the predicted TTFT, until leg 1 may go
    rest_seconds: float | None = None  # of it, from then on
    after_queue_seconds: float = 0.0  # of that, when the worker is idle
    held: Held = NOTHING_HELD
    kv_tokens: int = 0  # prompt and expected output
    observed: ObservedPlacement | None = None


class Scheduler:
    """Plans requests against the cluster as of now. Nothing is held by planning."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._chains = KnownChains()
        self._turn = 0
        self._explores = UnevenTurns()
        self._draw = Random().random  # noqa: S311 - draws who explores, no secrets

    @property
    def key_cache_bytes(self) -> int:
        """Of block keys of prompts that came before."""
        return self._chains.num_bytes

    def plan(
        self,
        model: str,
        prompts: Sequence[Sequence[int]] | None,
        salt: str | None,
        now: float,
        standing: Standing = _NOBODY,
        max_output_tokens: int | None = None,
        text: TextPrompt | None = None,
        *,
        what_if: bool = False,
    ) -> Plan:
        """`prompts` None: tokens unknown; then prefixes count by `text`, and prices go by its
        length, or an assumed one. `what_if`: nothing will come of it, so that it takes no turn, tries
        nothing out and asks no admission."""
        cluster = self._cluster
        policies = cluster.policies(model)
        if policies.scoped:
            policies = policies.of(standing)
        prefill_workers = cluster.serving(model, "prefill", now)
        decode_workers = cluster.serving(model, "decode", now)
        num_tokens = _length(prompts, text)
        held = self._held(prefill_workers or decode_workers, prompts, salt)
        if text is not None and text.keys:
            held.coming |= cluster.texts.held_tokens(text)
        options = [
            self._prefill_option(state, held, num_tokens, now, standing)
            for state in prefill_workers
        ]
        scheduling = policies.scheduling
        rules, source = scheduling.rules, self._source(held)
        shared = shared_tokens(held.tokens.values(), len(options)) if held.tokens else 0
        chance = 1.0 if what_if else self._chance(rules.explore_share)
        placing = Placing(num_tokens, self._turn, chance, shared)
        self._turn += not what_if
        ordered = place(rules, options, placing, source)
        if cluster.mixed and model in cluster.mixed:
            ordered, decode_workers = self._fitting(ordered, decode_workers)
        first = ordered[0] if ordered else None
        kv_tokens = num_tokens + cluster.expected_output(model, max_output_tokens)
        decode = [
            self._decode_option(state, first, kv_tokens, num_tokens) for state in decode_workers
        ]
        free = order_decode(decode, kv_tokens)
        by_turn = rules.algorithm not in ("cost", "mooncake")
        plan = Plan(
            policies, ordered, by_turn, decode, free, ADMITTED, source=source, standing=standing,
            held=held, held_blocks=held.blocks, kv_tokens=kv_tokens,
        )  # fmt: skip
        if scheduling.observe is not None:
            plan.observed = _observe(scheduling.observe, rules, options, placing, source)
        self._predict(plan, num_tokens, model)
        if plan.policies.slo.mode != "off" and not what_if:
            self._judge(plan, model, now)
        return plan

    def _chance(self, explore_share: float) -> float:
        """For `Placing`: below the share at this request's turn to try another worker."""
        draw = self._draw()
        return draw * explore_share if self._explores.is_due(explore_share, draw) else 1.0

    def _fitting(
        self, ordered: list[Priced], decode: list[WorkerState]
    ) -> tuple[list[Priced], list[WorkerState]]:
        """Of a model with several handshakes: the prefill workers that fit a decode worker, the
        first one that fits one with a free slot in front, and the decode workers that fit it.
        Where none fits now, decode computes prompts."""
        slots, workers = self._cluster.slots, self._cluster.workers
        free = [state for state in decode if slots.room(state.row.id, state.decode_cap) > 0]
        usable = [one for one in ordered if _fits(workers, one, decode)]
        if not usable:
            return [], decode
        first = next((one for one in usable if _fits(workers, one, free)), usable[0])
        usable.sort(key=lambda one: one is not first)
        return usable, _fits(workers, first, decode)

    def _source(self, held: Held) -> Source | None:
        """The node that holds most, where blocks can be brought from it at all."""
        if not self._cluster.paths.costs or not held.tokens:
            return None
        node_id = max(held.tokens, key=held.tokens.__getitem__)
        tokens, costs = held.tokens[node_id], self._cluster.paths.costs.get(node_id)
        return Source(node_id, tokens, costs) if tokens and costs else None

    def choose_decode(self, plan: Plan, model: str, num_tokens: int | None) -> None:
        """Anew, after a wait."""
        first = plan.prefill[0] if plan.prefill else None
        workers = self._cluster.serving(model, "decode", monotonic())
        if first is not None and model in self._cluster.mixed:
            workers = _fits(self._cluster.workers, first, workers) or workers
        tokens = max(plan.kv_tokens, num_tokens or 0)
        plan.decode = [
            self._decode_option(state, first, tokens, num_tokens or 0) for state in workers
        ]
        plan.free_decode = order_decode(plan.decode, tokens)

    def decode_options(self, model: str, now: float) -> list[DecodeOption]:
        """Decode workers as of now, for another try."""
        return [self._decode_option(s) for s in self._cluster.serving(model, "decode", now)]

    def _held(
        self, workers: list[WorkerState], prompts: Sequence[Sequence[int]] | None, salt: str | None
    ) -> Held:
        """What nodes hold of the prompts, from their heads, and will soon."""
        held = Held()
        if not prompts or not self._cluster.index.nodes():
            return held
        for namespace, block_tokens in _namespaces(workers):
            root = self._chains.root(namespace, salt)
            for tokens in prompts:
                if len(tokens) < block_tokens or not _are_int32(tokens):
                    continue
                keys = self._chains.keys(root, tokens, block_tokens)
                held.namespace, held.keys, held.block_tokens = namespace, keys, block_tokens
                lengths = self._cluster.index.held_lengths(namespace, keys)
                most = len(tokens) - 1
                for node, blocks in lengths.items():
                    if blocks:
                        usable = min(blocks * block_tokens, most)
                        held.blocks[node] = held.blocks.get(node, 0) + blocks
                        held.tokens[node] = held.tokens.get(node, 0) + usable
                for name, blocks in self._cluster.expected.lengths(keys).items():
                    usable = min(blocks * block_tokens, most)
                    held.coming[name] = held.coming.get(name, 0) + usable
        if len(prompts) > 1:
            held.keys = ()
        return held

    def _prefill_option(
        self,
        state: WorkerState,
        held: Held,
        num_tokens: int,
        now: float,
        standing: Standing,
    ) -> PrefillOption:
        row, queue = state.row, state.prefill_queue
        own = coming = 0
        if held.tokens or held.coming:
            own = min(max(held.usable(row.node_id), held.coming.get(row.id, 0)), num_tokens)
            on_way = min(held.coming.get(row.node_id, 0), num_tokens)
            coming = max(0, on_way - held.tokens.get(row.node_id, 0))
        seconds = queue.wait_seconds(now)
        if self._cluster.dispatch.anyone_waits:
            seconds += self._ahead(state, own, num_tokens, standing)
        return PrefillOption(
            row.id, row.node_id, own, seconds, queue.num_legs, state.prefill_times, coming
        )

    def _ahead(self, state: WorkerState, own: int, num_tokens: int, standing: Standing) -> float:
        """Predicted seconds of those that wait at gateways for the worker and go first."""
        dispatch, row = self._cluster.dispatch, state.row
        if not dispatch.is_waited_for(row.id):
            return 0.0
        seconds = state.prefill_times.predict(num_tokens - own, own)
        share = self._cluster.policies(row.model).admission.hit_min_share
        hit = own > 0 and own >= share * num_tokens
        leg = QueuedLeg("", num_tokens - own, seconds, standing.rank, hit, standing.tenant)
        return dispatch.ahead_seconds(row.id, leg)

    def _decode_option(
        self,
        state: WorkerState,
        first: Priced | None = None,
        kv_tokens: int = 0,
        num_tokens: int = 0,
    ) -> DecodeOption:
        """`kv_tokens`: of the request, prompt and expected output; `num_tokens`: of the prompt."""
        row, slots = state.row, self._cluster.slots
        beside = slots.beside(row.id)
        running = slots.running(row.id) + beside.slots
        in_use = slots.kv_tokens(row.id) + beside.kv_tokens
        cap = min(state.decode_cap, running + slots.room(row.id, state.decode_cap))
        tbt, handover, times = None, 0.0, state.decode_times
        if times.num_samples:
            tbt = times.predict_tbt(running + 1, in_use + kv_tokens)
        if first is not None:
            handover = self._handover(state, first.option.node_id, num_tokens)
        return DecodeOption(
            row.id, row.node_id, running, cap, tbt, handover, in_use,
            state.kv_capacity_tokens,
        )  # fmt: skip

    def _handover(self, state: WorkerState, source: str, num_tokens: int) -> float:
        """Seconds from leg 1's answer to leg 2's first byte, as such legs showed it; at first by
        the price of the path, or of computing the prompt where there is none."""
        node_id = state.row.node_id
        path = self._cluster.paths.costs.get(source, {}).get(node_id)
        seconds = state.decode_times.handover.predict(source, num_tokens, path)
        if path is None and source != node_id and not state.decode_times.handover.knows(source):
            return (seconds or 0.0) + state.prefill_times.predict(num_tokens, 0)
        return seconds or 0.0

    def _predict(self, plan: Plan, num_tokens: int, model: str) -> None:
        """Fill in what the first pair should give."""
        options = plan.free_decode or plan.decode
        best = options[0] if options else None
        handover, tbt = 0.0, None
        if best is not None:
            handover, tbt = best.handover_seconds, best.predicted_tbt_seconds
        if plan.prefill:
            first = plan.prefill[0]
            ttft, queued = first.ttft_seconds, first.option.queue_seconds
            # What else may run at its turn is within the window.
            beside = 0.0
            if queued:
                window = plan.policies.admission.queue.window_seconds
                beside = max(0.0, window - first.transfer_seconds - first.prefill_seconds)
        elif best is not None:  # decode-side prefill
            worker = self._cluster.workers[best.worker_id]
            ttft, queued, beside = worker.prefill_times.predict(num_tokens, 0), 0.0, 0.0
        else:
            return
        if plan.decode and not plan.free_decode:
            plan.slot_wait_seconds = self._slot_wait(plan, model)
        ttft += plan.slot_wait_seconds + handover
        turn = queued - beside if queued > beside else 0.0
        plan.predicted_handover_seconds = handover or None
        plan.predicted_tbt_seconds = tbt
        plan.predicted_ttft_seconds, plan.turn_seconds = ttft, turn
        plan.rest_seconds, plan.after_queue_seconds = ttft - turn, ttft - queued

    def _judge(self, plan: Plan, model: str, now: float) -> None:
        """Ask admission, where there is a prediction."""
        ttft, after = plan.predicted_ttft_seconds, plan.after_queue_seconds
        if ttft is None:
            return
        # What passes by waiting: for prefill, and for a decode slot.
        wait = ttft - after + plan.slot_wait_seconds
        predicted = Predicted(ttft, wait, plan.predicted_tbt_seconds)
        plan.admission = self._cluster.desk.judge(
            plan.policies, model, plan.standing, predicted, plan.turn_seconds, now
        )

    def _slot_wait(self, plan: Plan, model: str) -> float:
        """Those ahead and this one, served by all slots at the mean service time."""
        services = [
            seconds
            for option in plan.decode
            if (seconds := self._cluster.workers[option.worker_id].decode_times.predict_service())
        ]
        workers = self._cluster.workers
        num_slots = sum(workers[option.worker_id].decode_cap for option in plan.decode)
        if not services or not num_slots:
            return 0.0
        slots = self._cluster.slots
        others = max(slots.beside(option.worker_id).waiting for option in plan.decode)
        ahead = slots.waiting(model) + others + 1
        return ahead * (sum(services) / len(services)) / num_slots


def _fits(
    workers: Mapping[str, WorkerState], priced: Priced, decode: list[WorkerState]
) -> list[WorkerState]:
    """Those that may be leg 2 of a request whose leg 1 goes to `priced`; none if that has left."""
    first = workers.get(priced.option.worker_id)
    if first is None:
        return []
    return [state for state in decode if pairs(first.row.handshake, state.row.handshake)]


def _observe(
    algorithm: Algorithm, rules: Rules, options: list[PrefillOption], placing: Placing,
    source: Source | None,
) -> ObservedPlacement | None:  # fmt: skip
    others = msgspec.structs.replace(rules, algorithm=algorithm, explore_share=0.0)
    ordered = place(others, options, placing, source)
    if not ordered:
        return None
    first = ordered[0]
    return ObservedPlacement(algorithm, first.option.worker_id, first.ttft_seconds)


def _length(prompts: Sequence[Sequence[int]] | None, text: TextPrompt | None) -> int:
    if prompts is not None:
        return sum(map(len, prompts))
    return UNKNOWN_PROMPT_TOKENS if text is None else max(1, text.num_tokens)


def _are_int32(tokens: Sequence[int]) -> bool:
    """Ours are; a client's own ids need not be."""
    return isinstance(tokens, array) or (min(tokens) >= 0 and max(tokens) < 2**31)


def _namespaces(workers: list[WorkerState]) -> set[tuple[bytes, int]]:
    return {
        (state.namespace, state.block_tokens)
        for state in workers
        if state.namespace is not None and state.block_tokens
    }
