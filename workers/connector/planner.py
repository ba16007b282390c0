"""The scheduler half's decisions, without vLLM and without I/O of its own.

One `Planner` follows every request of an engine from its first match to its end. It asks the pool
through `PoolCalls` and turns answers into orders for the worker half. Time is an argument.

A request's life here:
    add -> match (any number of times, changes nothing outside) -> allocate (pins, plans a load)
        -> step (orders for loads and for stores of what is computed) -> apply (results)
        -> finish (unpins, reports)
A preempted request goes through match and allocate again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from workers.connector.legs import leg_report, pool_hit_tokens
from workers.connector.matching import Matcher
from workers.connector.metadata import (
    BlockLoad,
    LoadOrder,
    LoadResult,
    PageTarget,
    StepOrders,
    StepResults,
    StoreOrder,
)
from workers.connector.promotion import PromotionJudge
from workers.connector.request import PoolCalls, RequestInfo, RequestState, Scheduled
from workers.connector.settings import ConnectorSettings
from workers.core.ids import OwnerId, transfer_owner
from workers.core.messages import SlotRef

__all__ = ["Planner", "PoolCalls", "RequestInfo", "Scheduled"]

_LOADING_BOUND_SECONDS = 30.0
_LOST = SlotRef(-1, 0)
_TIMED_STEP_TOKENS = 16  # a step with fewer to prefill says nothing of what a token costs
_MAX_TIMED_STEPS = 16


class Planner:
    """Not thread-safe: vLLM's scheduler calls it from one thread."""

    def __init__(self, settings: ConnectorSettings, pool: PoolCalls) -> None:
        self._settings = settings
        self._pool = pool
        self._judge = PromotionJudge(settings.promote_timeout_seconds)
        self._matcher = Matcher(settings, pool, self._judge)
        self._requests: dict[str, RequestState] = {}
        # Ended, but the worker half has not yet said what the last step stored.
        self._ended: dict[str, RequestState] = {}
        self._loads: list[LoadOrder] = []
        # Blocks that a step in flight reads: nobody else may take them from the device's cache
        # until they are verified. (request, attempt) -> (since, hashes)
        self._loading: dict[tuple[str, int], tuple[float, frozenset[bytes]]] = {}
        self._steps = 0
        self._timed: dict[int, tuple[float, int]] = {}  # number -> (began, tokens)
        self._step_ended = 0.0
        self._counts: Counter[str] = Counter()

    # --- requests -----------------------------------------------------------------------------

    def add(self, info: RequestInfo) -> None:
        """Start to follow a request; a known id is left as it is."""
        if info.request_id in self._requests:
            return
        state = self._requests[info.request_id] = RequestState(info)
        if info.label and info.transfer_id and not info.skip:
            self._pool.label(info.transfer_id, info.label)
        if info.skip:
            return
        self._matcher.add(state)
        if info.leg == "decode" and info.transfer_id:  # its pins must outlast the wait for a turn
            self._pool.keep(transfer_owner(info.transfer_id))

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def match(
        self, request_id: str, num_local_tokens: int, num_tokens: int, now: float
    ) -> int | None:
        """Tokens that the pool can add after `num_local_tokens`; None asks to come back later.

        May be called any number of times. Never the whole of `num_tokens`, never part of a pool
        block. Only what it has brought from SSD is pinned, until the request's load or end.
        """
        state = self._requests.get(request_id)
        if state is None or state.info.skip:
            return 0
        state.local_tokens = num_local_tokens
        self._matcher.hash(state)
        if self._shares_unverified(state, num_local_tokens, now):
            return None
        return self._matcher.external_tokens(state, num_tokens, now)

    def _shares_unverified(self, state: RequestState, num_local_tokens: int, now: float) -> bool:
        if not self._loading or not num_local_tokens:
            return False
        covered = -(-num_local_tokens // self._settings.block_tokens)
        mine = state.hashes[:covered]
        return any(
            now - since < _LOADING_BOUND_SECONDS and not hashes.isdisjoint(mine)
            for since, hashes in self._loading.values()
        )

    # --- loads --------------------------------------------------------------------------------

    def allocate(
        self, request_id: str, block_ids: Sequence[int], num_external_tokens: int, now: float
    ) -> None:
        """The engine gave the request its blocks; pin what it will load and plan the load."""
        state = self._requests.get(request_id)
        if state is None:
            return
        self._matcher.remove(request_id)
        state.block_ids = list(block_ids)
        state.store_from = 0
        self._push(state)
        if not state.was_allocated:
            state.was_allocated = True
            state.device_hit_tokens = state.local_tokens
            state.pool_hit_tokens = num_external_tokens
            self._count_short(state)
        if num_external_tokens > 0:
            self._plan_load(state, num_external_tokens, now)
        else:
            self._unpin(state)

    def _push(self, state: RequestState) -> None:
        """Once it runs, leg 1's blocks may go to leg 2's node as they are stored."""
        info = state.info
        if state.pushed or info.target is None or info.leg != "prefill" or not state.hashes:
            return
        if self._settings.stores:
            state.pushed = True
            owner = transfer_owner(info.transfer_id)
            self._pool.push(owner, state.hashes, info.target, state.tenant)

    def _count_short(self, state: RequestState) -> None:
        """Leg 1 promised leg 2 a prefix; what is missing of it is a hole."""
        if state.info.leg != "decode":
            return
        block_tokens = self._settings.block_tokens
        whole = (len(state.info.prompt_token_ids) - 1) // block_tokens
        found = (state.device_hit_tokens + state.pool_hit_tokens) // block_tokens
        self._counts["short_prefix_blocks"] += max(
            0, min(state.info.expected_blocks, whole) - found
        )

    def _plan_load(self, state: RequestState, num_external_tokens: int, now: float) -> None:
        block_tokens = self._settings.block_tokens
        first = state.local_tokens // block_tokens
        end = (state.local_tokens + num_external_tokens) // block_tokens
        owner = self._matcher.load_owner(state)
        # The blocks before `first` are on the device; a pin on a block protects its ancestors.
        slots = self._pool.prepare_load(owner, state.hashes[first:end])
        state.holds_pins |= slots is not None
        found = list(slots or ()) + [_LOST] * (end - first)
        blocks = tuple(
            BlockLoad(state.hashes[index], ref.slot, ref.generation, self._pages(state, index))
            for index, ref in zip(range(first, end), found, strict=False)
        )
        order = LoadOrder(
            state.info.request_id, state.attempt, self._pool.incarnation, first, blocks
        )
        self._loads.append(order)
        hashes = frozenset(block.block_hash for block in blocks)
        self._loading[order.request_id, order.attempt] = (now, hashes)
        state.store_from = end

    def _pages(self, state: RequestState, index: int) -> tuple[PageTarget, ...]:
        """The pages of pool block `index` that the device does not hold already."""
        per_block = self._settings.pages_per_block
        held = state.local_tokens // self._settings.engine_block_tokens
        return tuple(
            PageTarget(page, state.block_ids[index * per_block + page])
            for page in range(per_block)
            if index * per_block + page >= held
        )

    # --- steps --------------------------------------------------------------------------------

    def step(self, scheduled: Sequence[Scheduled], now: float) -> StepOrders:
        """Orders for the step that computes `scheduled`."""
        self._report_ended()
        self._matcher.end_step(now)
        loads, self._loads = tuple(self._loads), []
        stores = [self._plan_store(part) for part in scheduled]
        number = self._time_step(scheduled, now)
        return StepOrders(loads, tuple(store for store in stores if store is not None), number)

    def _time_step(self, scheduled: Sequence[Scheduled], now: float) -> int:
        """A number for a step that will say what prefilling costs, else 0."""
        tokens = sum(part.num_scheduled_tokens for part in scheduled if self._prefills(part))
        if tokens < _TIMED_STEP_TOKENS:
            return 0
        self._steps += 1
        self._timed[self._steps] = (now, tokens)
        while len(self._timed) > _MAX_TIMED_STEPS:
            del self._timed[next(iter(self._timed))]
        return self._steps

    def _prefills(self, part: Scheduled) -> bool:
        state = self._requests.get(part.request_id)
        return state is not None and part.num_computed_tokens < len(state.info.prompt_token_ids)

    def _plan_store(self, part: Scheduled) -> StoreOrder | None:
        state = self._requests.get(part.request_id)
        if state is None:
            return None
        if part.replaces_blocks:
            state.block_ids = list(part.block_ids)
        else:
            state.block_ids.extend(part.block_ids)
        if not self._settings.stores or state.info.skip:
            return None
        self._matcher.hash(state)
        computed = part.num_computed_tokens + part.num_scheduled_tokens
        start = state.store_from
        end = min(len(state.hashes), computed // self._settings.block_tokens)
        if end <= start:
            return None
        state.store_from = end
        state.stores_under_way += 1
        per_block = self._settings.pages_per_block
        return StoreOrder(
            request_id=part.request_id,
            attempt=state.attempt,
            owner=self._store_owner(state.info),
            namespace=state.hashed_namespace,
            parent=state.hashes[start - 1] if start else b"",
            block_hashes=tuple(state.hashes[start:end]),
            block_ids=tuple(state.block_ids[start * per_block : end * per_block]),
            tenant=state.tenant,
        )

    def _store_owner(self, info: RequestInfo) -> OwnerId:
        """Blocks of a leg 1 stay pinned until the transfer ends; others may go at once."""
        if info.transfer_id and info.leg == "prefill":
            return transfer_owner(info.transfer_id)
        return OwnerId(f"store:{self._settings.worker_id}:{info.request_id}")

    def apply(self, results: StepResults, now: float) -> set[int]:
        """Take in what the worker half did.

        Returns the engine's blocks that hold unverified bytes: they must leave its prefix cache.
        """
        for number in results.steps:
            self._learn(number, now)
        spoiled: set[int] = set()
        for load in results.loads:
            self._loading.pop((load.request_id, load.attempt), None)
            state = self._requests.get(load.request_id)
            if state is None:
                continue
            if state.info.leg != "prefill":
                self._end_waiting(state)
                self._unpin(state)  # leg 1 keeps what it read pinned until leg 2's pins take over
            state.loads.append(load)
            if load.first_failed >= 0 and load.attempt == state.attempt:
                spoiled.update(self._after_failed_load(state, load))
        for store in results.stores:
            ended = self._ended.get(store.request_id)
            if state := self._requests.get(store.request_id, ended):
                state.stores_under_way -= 1
                state.stored_blocks += store.stored_blocks
                state.stored_bytes += store.stored_bytes
        self._report_ended()
        return spoiled

    def _learn(self, number: int, now: float) -> None:
        """Steps may overlap: one's time begins when the one before has ended."""
        if timed := self._timed.pop(number, None):
            began, tokens = timed
            self._judge.note_step(tokens, now - max(began, self._step_ended), now)
        self._step_ended = now

    def _after_failed_load(self, state: RequestState, load: LoadResult) -> list[int]:
        """No second try: another hit of the same request can livelock a small device cache."""
        state.load_failed = True
        state.attempt += 1
        state.store_from = load.first_failed
        return state.block_ids[load.first_failed * self._settings.pages_per_block :]

    def _unpin(self, state: RequestState) -> None:
        if state.holds_pins:
            state.holds_pins = False
            self._pool.release(self._matcher.load_owner(state))

    # --- ends ---------------------------------------------------------------------------------

    def finish(self, request_id: str, *, completed: bool) -> dict[str, Any] | None:
        """Forget the request, unpin, report. Returns what leg 1's reply tells the gateway."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        self._forget_unsent(request_id)
        self._matcher.remove(request_id)
        reply = None
        hands_over = state.info.leg == "prefill" and self._settings.stores and not state.info.skip
        if completed and hands_over:
            reply = {"perilune": self._hand_over(state)}
        self._end_waiting(state)
        self._unpin(state)
        if state.info.skip:
            return None
        self._hint(state)
        if state.was_allocated and state.stores_under_way > 0:
            self._ended[request_id] = state
        elif state.was_allocated:
            self._pool.report(leg_report(self._settings, state))
        return reply

    def _end_waiting(self, state: RequestState) -> None:
        """What leg 1 pinned is leg 2's no longer: the gateway ends it, or its lease does."""
        if state.info.leg == "decode" and state.info.transfer_id:
            self._pool.let_go(transfer_owner(state.info.transfer_id))

    def _hint(self, state: RequestState) -> None:
        """Once a request: leg 1 leaves it to leg 2, the last to use the chain."""
        if state.info.session and state.hashes and state.info.leg != "prefill":
            self._pool.hint(state.hashes, state.info.session)

    def _report_ended(self) -> None:
        """vLLM ends a request before it hands over the same step's results: these have come."""
        ended, self._ended = self._ended, {}
        for state in ended.values():
            self._pool.report(leg_report(self._settings, state))

    def _forget_unsent(self, request_id: str) -> None:
        """An end before the step went out leaves nothing for the worker half to do."""
        for order in [order for order in self._loads if order.request_id == request_id]:
            self._loads.remove(order)
            self._loading.pop((order.request_id, order.attempt), None)

    def _hand_over(self, state: RequestState) -> dict[str, Any]:
        """Pin the prompt's blocks for leg 2 and say how many of them it will find."""
        num_blocks = 0
        if state.hashes:
            owner = transfer_owner(state.info.transfer_id)
            num_blocks = self._pool.pin_prefix(owner, state.hashes)
        return {
            "transfer_id": state.info.transfer_id,
            "num_blocks": num_blocks,
            "device_hit_tokens": state.device_hit_tokens,
            "pool_hit_tokens": pool_hit_tokens(state, self._settings.block_tokens),
        }

    def reset_cache(self) -> None:
        """Forget what lookups said. The pool is shared and stays as it is."""
        self._matcher.forget_answers()

    def take_counts(self) -> dict[str, float]:
        """Counter increments since the last call."""
        counts = {name: float(count) for name, count in self._counts.items() if count}
        counts |= {name: float(count) for name, count in self._matcher.counts.items() if count}
        self._counts.clear()
        self._matcher.counts.clear()
        return counts

    def num_requests(self) -> int:
        return len(self._requests)

    def check_integrity(self) -> None:
        """Invariants; tests call this after each step."""
        for state in self._requests.values():
            assert not (state.holds_pins and state.info.skip)
            assert state.store_from <= max(len(state.hashes), state.store_from)
            assert state.device_hit_tokens + state.pool_hit_tokens <= max(
                len(state.info.prompt_token_ids), state.device_hit_tokens
            )
        for order in self._loads:
            assert order.request_id in self._requests
