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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workers.connector.metadata import (
    BlockLoad,
    LoadOrder,
    LoadResult,
    PageTarget,
    StepOrders,
    StepResults,
    StoreOrder,
)
from workers.connector.settings import ConnectorSettings
from workers.core.hashing import block_hashes, root_hash
from workers.core.ids import BlockHash, OwnerId, load_owner, transfer_owner
from workers.core.messages import LegReport, LookupReply, SlotRef

_LOADING_BOUND_SECONDS = 30.0
_LOST = SlotRef(-1, 0)


class PoolCalls(Protocol):
    """The node agent as the planner sees it. Every call is bounded; None means no answer."""

    @property
    def namespace(self) -> bytes:
        """Digest of this engine's namespace; empty until the worker half has registered it."""

    @property
    def incarnation(self) -> int:
        """The agent's incarnation; 0 while none is connected."""

    def lookup(self, hashes: Sequence[bytes]) -> LookupReply | None:
        """How much of a chain is held."""

    def prepare_load(self, owner: str, hashes: Sequence[bytes]) -> list[SlotRef] | None:
        """Pin the held prefix of `hashes`; its slots."""

    def pin_prefix(self, owner: str, hashes: Sequence[bytes]) -> int:
        """Pin what is held or being stored; for how many blocks, 0 without an answer."""

    def release(self, owner: str) -> None:
        """End the owner's pins, some time soon."""

    def report(self, leg: LegReport) -> None:
        """Hand in a leg's report, some time soon."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The parts of an engine's request that matter here."""

    request_id: str
    prompt_token_ids: Sequence[int]
    cache_salt: str | None = None
    lora: str | None = None
    extras: Sequence[tuple[bytes, ...]] = ()
    transfer_id: str = ""
    leg: str = ""  # "prefill", "decode", or empty for a request that came past the gateway
    expected_blocks: int = 0
    skip: bool = False  # reads and writes nothing of the pool, and counts as neither hit nor miss


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part of a step. `block_ids` are appended unless `replaces_blocks`."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: Sequence[int] = ()
    replaces_blocks: bool = False


@dataclass(slots=True)
class _Request:
    info: RequestInfo
    hashes: list[BlockHash] = field(default_factory=list)
    hashed_namespace: bytes = b""
    attempt: int = 0
    load_failed: bool = False
    block_ids: list[int] = field(default_factory=list)
    store_from: int = 0  # pool blocks before this one need no store order
    lookup: LookupReply | None = None
    looked_up_at: float = 0.0
    lookup_epoch: int = -1
    wait_began: float | None = None
    wait_seconds: float = 0.0
    local_tokens: int = 0
    was_allocated: bool = False
    device_hit_tokens: int = 0
    pool_hit_tokens: int = 0
    holds_pins: bool = False
    loads: list[LoadResult] = field(default_factory=list)
    stores_under_way: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0


class Planner:
    """Not thread-safe: vLLM's scheduler calls it from one thread."""

    def __init__(self, settings: ConnectorSettings, pool: PoolCalls) -> None:
        self._settings = settings
        self._pool = pool
        self._requests: dict[str, _Request] = {}
        # Ended, but the worker half has not yet said what the last step stored.
        self._ended: dict[str, _Request] = {}
        self._loads: list[LoadOrder] = []
        # Blocks that a step in flight reads: nobody else may take them from the device's cache
        # until they are verified. (request, attempt) -> (since, hashes)
        self._loading: dict[tuple[str, int], tuple[float, frozenset[bytes]]] = {}
        self._epoch = 0

    # --- requests -----------------------------------------------------------------------------

    def add(self, info: RequestInfo) -> None:
        """Start to follow a request; a known id is left as it is."""
        self._requests.setdefault(info.request_id, _Request(info))

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def match(
        self, request_id: str, num_local_tokens: int, num_tokens: int, now: float
    ) -> int | None:
        """Tokens that the pool can add after `num_local_tokens`; None asks to come back later.

        Takes no pins and may be called any number of times. Never the whole of `num_tokens`,
        never part of a pool block.
        """
        state = self._requests.get(request_id)
        if state is None or state.info.skip:
            return 0
        state.local_tokens = num_local_tokens
        self._hash(state)
        if self._shares_unverified(state, num_local_tokens, now):
            return None
        block_tokens = self._settings.block_tokens
        cap = min(len(state.hashes), (num_tokens - 1) // block_tokens)
        if state.load_failed or cap * block_tokens <= num_local_tokens:
            return self._matched(state, 0, now)
        found = self._lookup(state, cap, now)
        if found is None:
            return self._matched(state, 0, now)
        if self._should_wait(state, found, cap, now):
            return None
        external = min(found.num_held, cap) * block_tokens - num_local_tokens
        return self._matched(state, max(0, external), now)

    def _matched(self, state: _Request, num_tokens: int, now: float) -> int:
        if state.wait_began is not None:
            state.wait_seconds += now - state.wait_began
            state.wait_began = None
        return num_tokens

    def _hash(self, state: _Request) -> None:
        """Keys need the namespace, which comes with the agent's first answer."""
        namespace = self._pool.namespace
        if not namespace or state.hashed_namespace == namespace:
            return
        info = state.info
        root = root_hash(namespace, info.cache_salt, info.lora)
        state.hashes = block_hashes(
            root, info.prompt_token_ids, self._settings.block_tokens, info.extras
        )
        state.hashed_namespace = namespace

    def _lookup(self, state: _Request, cap: int, now: float) -> LookupReply | None:
        age = now - state.looked_up_at
        fresh = state.lookup_epoch == self._epoch and age < self._settings.lookup_ttl_seconds
        if state.lookup is not None and fresh:
            return state.lookup
        state.lookup = self._pool.lookup(state.hashes[:cap])
        state.looked_up_at = now
        state.lookup_epoch = self._epoch
        return state.lookup

    def _should_wait(self, state: _Request, found: LookupReply, cap: int, now: float) -> bool:
        """Leg 2 waits, bounded, for blocks that leg 1 is still writing."""
        wanted = min(cap, state.info.expected_blocks)
        if state.info.leg != "decode" or found.num_held >= wanted or not found.num_pending:
            return False
        if state.wait_began is None:
            state.wait_began = now
        waited = state.wait_seconds + now - state.wait_began
        return waited < self._settings.load_timeout_seconds

    def _shares_unverified(self, state: _Request, num_local_tokens: int, now: float) -> bool:
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
        state.block_ids = list(block_ids)
        state.store_from = 0
        if not state.was_allocated:
            state.was_allocated = True
            state.device_hit_tokens = state.local_tokens
            state.pool_hit_tokens = num_external_tokens
        if num_external_tokens > 0:
            self._plan_load(state, num_external_tokens, now)

    def _plan_load(self, state: _Request, num_external_tokens: int, now: float) -> None:
        block_tokens = self._settings.block_tokens
        first = state.local_tokens // block_tokens
        end = (state.local_tokens + num_external_tokens) // block_tokens
        owner = load_owner(self._settings.worker_id, state.info.request_id)
        # The blocks before `first` are on the device; a pin on a block protects its ancestors.
        slots = self._pool.prepare_load(owner, state.hashes[first:end])
        state.holds_pins = slots is not None
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

    def _pages(self, state: _Request, index: int) -> tuple[PageTarget, ...]:
        """The pages of pool block `index` that the device does not hold already."""
        per_block = self._settings.pages_per_block
        held = state.local_tokens // self._settings.engine_block_tokens
        return tuple(
            PageTarget(page, state.block_ids[index * per_block + page])
            for page in range(per_block)
            if index * per_block + page >= held
        )

    # --- steps --------------------------------------------------------------------------------

    def step(self, scheduled: Sequence[Scheduled]) -> StepOrders:
        """Orders for the step that computes `scheduled`."""
        self._report_ended()
        loads, self._loads = tuple(self._loads), []
        stores = [self._plan_store(part) for part in scheduled]
        return StepOrders(loads, tuple(store for store in stores if store is not None))

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
        self._hash(state)
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
        )

    def _store_owner(self, info: RequestInfo) -> OwnerId:
        """Blocks of a leg 1 stay pinned until the transfer ends; others may go at once."""
        if info.transfer_id and info.leg == "prefill":
            return transfer_owner(info.transfer_id)
        return OwnerId(f"store:{self._settings.worker_id}:{info.request_id}")

    def apply(self, results: StepResults) -> set[int]:
        """Take in what the worker half did.

        Returns the engine's blocks that hold unverified bytes: they must leave its prefix cache.
        """
        spoiled: set[int] = set()
        for load in results.loads:
            self._loading.pop((load.request_id, load.attempt), None)
            state = self._requests.get(load.request_id)
            if state is None:
                continue
            if state.info.leg != "prefill":
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

    def _after_failed_load(self, state: _Request, load: LoadResult) -> list[int]:
        """No second try: another hit of the same request can livelock a small device cache."""
        state.load_failed = True
        state.attempt += 1
        state.store_from = load.first_failed
        return state.block_ids[load.first_failed * self._settings.pages_per_block :]

    def _unpin(self, state: _Request) -> None:
        if state.holds_pins:
            state.holds_pins = False
            self._pool.release(load_owner(self._settings.worker_id, state.info.request_id))

    # --- ends ---------------------------------------------------------------------------------

    def finish(self, request_id: str, *, completed: bool) -> dict[str, Any] | None:
        """Forget the request, unpin, report. Returns what leg 1's reply tells the gateway."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        self._forget_unsent(request_id)
        reply = None
        hands_over = state.info.leg == "prefill" and self._settings.stores and not state.info.skip
        if completed and hands_over:
            reply = {"perilune": self._hand_over(state)}
        self._unpin(state)
        if state.info.skip:
            return None
        if state.was_allocated and state.stores_under_way > 0:
            self._ended[request_id] = state
        elif state.was_allocated:
            self._pool.report(self._leg_report(state))
        return reply

    def _report_ended(self) -> None:
        """vLLM ends a request before it hands over the same step's results: these have come."""
        ended, self._ended = self._ended, {}
        for state in ended.values():
            self._pool.report(self._leg_report(state))

    def _forget_unsent(self, request_id: str) -> None:
        """An end before the step went out leaves nothing for the worker half to do."""
        for order in [order for order in self._loads if order.request_id == request_id]:
            self._loads.remove(order)
            self._loading.pop((order.request_id, order.attempt), None)

    def _hand_over(self, state: _Request) -> dict[str, Any]:
        """Pin the prompt's blocks for leg 2 and say how many of them it will find."""
        num_blocks = 0
        if state.hashes:
            owner = transfer_owner(state.info.transfer_id)
            num_blocks = self._pool.pin_prefix(owner, state.hashes)
        return {
            "transfer_id": state.info.transfer_id,
            "num_blocks": num_blocks,
            "device_hit_tokens": state.device_hit_tokens,
            "pool_hit_tokens": self._pool_hit_tokens(state),
        }

    def _pool_hit_tokens(self, state: _Request) -> int:
        """What was loaded and verified; a failed load's rest was computed after all."""
        failed = [load for load in state.loads if load.first_failed >= 0]
        if not failed:
            return state.pool_hit_tokens
        usable = failed[0].first_failed * self._settings.block_tokens - state.device_hit_tokens
        return min(max(0, usable), state.pool_hit_tokens)

    def _leg_report(self, state: _Request) -> LegReport:
        pool_hit = self._pool_hit_tokens(state)
        prompt_tokens = len(state.info.prompt_token_ids)
        verify = sum(load.verify_seconds for load in state.loads)
        scatter = sum(load.scatter_seconds for load in state.loads)
        by_layer = state.loads[-1].by_layer_seconds if state.loads else []
        return LegReport(
            transfer_id=state.info.transfer_id,
            worker_id=self._settings.worker_id,
            kv_role=self._settings.kv_role,
            prompt_tokens=prompt_tokens,
            device_hit_tokens=state.device_hit_tokens,
            pool_hit_tokens=pool_hit,
            computed_tokens=prompt_tokens - state.device_hit_tokens - pool_hit,
            loaded_blocks=sum(load.loaded_blocks for load in state.loads),
            failed_blocks=sum(load.failed_blocks for load in state.loads),
            stored_blocks=state.stored_blocks,
            loaded_bytes=sum(load.loaded_bytes for load in state.loads),
            stored_bytes=state.stored_bytes,
            kv_wait_seconds=state.wait_seconds + verify + scatter,
            kv_wait_by_layer_seconds=list(by_layer),
            kv_wait_by_stage_seconds={
                "queue": state.wait_seconds,
                "wire": 0.0,
                "verify": verify,
                "scatter": scatter,
            },
            observed="layer" if by_layer else "stage",
        )

    def reset_cache(self) -> None:
        """Forget what lookups said. The pool is shared and stays as it is."""
        self._epoch += 1

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
