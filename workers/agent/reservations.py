"""Slots of this node that agents of other nodes fill with finished blocks (R26).

    source: Reserve ──▶ slots pending here, listed as reserved ──▶ the transfer server's threads fill
    them and verify ──▶ landed: readable, pinned for the transfer

A slot that is being filled stays its writer's: a reservation that ends early waits for it (I2). What
does not land is a failed write: it stops to be pending, and whoever asked for it pulls or computes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from workers.agent.handshake import check_reserve
from workers.agent.pool_requests import short_tenant
from workers.agent.session import Session
from workers.agent.transfers import NodeTransfers
from workers.core.clock import Clock
from workers.core.ids import OwnerId, request_of
from workers.core.messages import Done, Refused, ReplyBody, SlotRef, StoredSlot
from workers.core.owners import TRANSFER_PREFIX
from workers.core.pool_state import ClientRef, PoolState
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_choice import PRIORS, Cost
from workers.core.transfer_messages import Reserve, Reserved, Unreserve
from workers.core.transfer_modes import ModeCosts, ModeStats
from workers.core.transfer_policy import mode_of
from workers.core.transfer_types import Direction
from workers.transfer.push import MAX_RESERVED, ReservedSlots

MAX_RUNS: Final = 1024
MAX_REQUESTS: Final = 1024
WITHDRAW_AGAIN_SECONDS: Final = 0.05
_log = logging.getLogger(__name__)


class ReservingNode(Protocol):
    """What of the node is needed here."""

    clock: Clock
    namespaces: dict[bytes, NamespaceSpec]

    @property
    def pool(self) -> PoolState | None: ...
    @property
    def node_id(self) -> str: ...
    def publish(self) -> None:
        """Tell subscribers what changed."""


@dataclass(slots=True, eq=False)
class _Run:
    """What one `Reserve` was given."""

    owner: OwnerId
    client: ClientRef
    pool: PoolState
    connection: int
    request: str
    reserved: ReservedSlots
    waiting: dict[int, tuple[int, bytes]]  # slot -> generation, key
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Pushed:
    """What a request's pushes have done so far."""

    source: str
    num_bytes: int = 0
    num_waiting: int = 0
    asked_at: float | None = None  # when its decode leg came for its blocks
    told: bool = False
    failed: bool = False


@dataclass(slots=True)
class _Landed:
    slot: int
    generation: int
    checksum: int


class Reservations:
    """Runs in the agent's loop, but for `_on_landed`. `on_failed(keys)`: these will not be pushed."""

    def __init__(self, node: ReservingNode, transfers: NodeTransfers) -> None:
        self._node = node
        self._transfers = transfers
        self._runs: set[_Run] = set()
        self._by_slot: dict[int, _Run] = {}
        self._requests: OrderedDict[str, _Pushed] = OrderedDict()
        self._landed: deque[_Landed] = deque()
        self._timers: set[asyncio.TimerHandle] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.modes = ModeCosts()
        self.on_failed: Callable[[Sequence[bytes]], None] = lambda keys: None
        transfers.on_landed = self._on_landed

    def handlers(self) -> dict[type, Callable[[Session, Any], ReplyBody]]:
        return {Reserve: self.reserve, Unreserve: self.unreserve}

    # --- requests ---------------------------------------------------------------------------

    def reserve(self, session: Session, body: Reserve) -> ReplyBody:
        """Slots for what is missing, as far as there is room; or that this node rather pulls."""
        pool, node = self._node.pool, self._node
        if session.hello.role != "agent" or not body.owner.startswith(TRANSFER_PREFIX):
            return Refused(
                "role", f"Reserve of {body.owner!r} from a {session.hello.role}: agents may, for a "
                "transfer."
            )  # fmt: skip
        if (refused := check_reserve(body)) is not None:
            return refused
        reserved = self._transfers.reserved
        ways = self._transfers.pushed_by
        if pool is None or reserved is None or not ways or body.namespace not in node.namespaces:
            return Reserved("pull")
        now = node.clock.monotonic()
        full = len(self._by_slot) + len(body.block_hashes) > MAX_RESERVED
        if full or len(self._runs) >= MAX_RUNS or (body.first and not self._wants(body, pool, now)):
            return Reserved("pull")
        number = next(self._transfers.numbers)
        client = ClientRef(self._transfers.connection(number), body.source)
        owner = OwnerId(f"push:{node.node_id}:{number}")
        prepared = pool.prepare_store(
            client, owner, body.namespace, body.parent, body.block_hashes, now,
            short_tenant(body.tenant),
        )  # fmt: skip
        pool.pin_prefix(session.client, OwnerId(body.owner), body.namespace, body.block_hashes, now)
        given = prepared.slots[: len(prepared.slots) - prepared.num_refused]
        keys = {
            ref.slot: (ref.generation, key)
            for ref, key in zip(given, body.block_hashes, strict=False)
            if ref is not None
        }
        seconds = self._transfers.policy.fetch_seconds
        if keys:
            pool.never_expires(owner)
            run = _Run(
                owner, client, pool, session.connection, request_of(OwnerId(body.owner)),
                reserved, keys,
            )  # fmt: skip
            self._begin(run, body.source, seconds)
        else:
            pool.release(owner, now)
        slots = [None if ref is None else (ref.slot, ref.generation) for ref in given]
        return Reserved("push", slots, ways, seconds)

    def unreserve(self, session: Session, body: Unreserve) -> ReplyBody:
        runs = {
            run
            for slot, generation in body.slots
            if (run := self._by_slot.get(slot)) is not None
            and run.connection == session.connection
            and run.waiting[slot][0] == generation
        }
        wanted = dict(body.slots)
        for run in runs:
            self._withdraw(run, [slot for slot in run.waiting if slot in wanted], body.cancelled)
        return Done(len(runs))

    def goodbye(self, connection: int) -> None:
        """The source's connection ended: what it has not begun to write will not come."""
        for run in [run for run in self._runs if run.connection == connection]:
            self._withdraw(run, list(run.waiting))

    def asked_for(self, owner: str) -> None:
        """A decode leg came for its blocks: from now on a push that is not done costs it time."""
        pushed = self._requests.get(request_of(OwnerId(owner)))
        if pushed is not None and pushed.asked_at is None:
            pushed.asked_at = self._node.clock.monotonic()
            self._tell(pushed)

    def pulled(self, source: str, num_bytes: int, seconds: float) -> None:
        """A decode leg waited so long for blocks that were pulled."""
        self.modes.observe(source, "pull", num_bytes, seconds, self._node.clock.monotonic())

    def mode_stats(self) -> list[ModeStats]:
        """How blocks come from each source, as the policy is now."""
        policy, node_id = self._transfers.policy, self._node.node_id
        return self.modes.report(lambda source: mode_of(policy, source, node_id))

    def close(self) -> None:
        """The server has been closed before: nobody writes any more."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._drain()
        for run in list(self._runs):
            self._withdraw(run, list(run.waiting))

    # --- one run ----------------------------------------------------------------------------

    def _wants(self, body: Reserve, pool: PoolState, now: float) -> bool:
        """Weigh a push against a pull, for the whole chain."""
        engine, node_id = self._transfers.engine, self._node.node_id
        if engine is None:
            return False
        push = PRIORS["tcp"]
        if body.bytes_per_second > 0:
            push = Cost(body.latency_seconds, body.bytes_per_second)
        # It is the same way, and the source may have measured it where nothing was pulled yet.
        pull = engine.best_cost(body.source, Direction.PULL, unmeasured=push)
        num_bytes = max(1, body.num_total) * pool.block_bytes
        forced = mode_of(self._transfers.policy, body.source, node_id)
        chosen = self.modes.choose(body.source, num_bytes, (pull, push), now, forced)
        return chosen.mode == "push"

    def _begin(self, run: _Run, source: str, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._runs.add(run)
        pushed = self._requests.setdefault(run.request, _Pushed(source))
        pushed.num_waiting += len(run.waiting)
        while len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)
        for slot, (generation, key) in run.waiting.items():
            self._by_slot[slot] = run
            run.reserved.reserve(slot, generation, key, run.pool.block_bytes)
        run.timer = self._later(seconds, self._expire, run)

    def _expire(self, run: _Run) -> None:
        if run in self._runs:
            _log.warning("push_late slots=%d", len(run.waiting))
            self._withdraw(run, list(run.waiting))

    def _withdraw(self, run: _Run, slots: Sequence[int], cancelled: bool = False) -> None:
        """Take these back; those that are being written, once their writers have let go."""
        self._drain()
        waiting = [slot for slot in slots if slot in run.waiting]
        free = [slot for slot in waiting if run.reserved.withdraw(slot)]
        failed = [SlotRef(slot, run.waiting[slot][0]) for slot in free]
        keys = [run.waiting[slot][1] for slot in free]
        if failed:
            run.pool.complete_store(self._node.clock.monotonic(), [], failed)
            if not cancelled:
                self._note_failure(run)
            self._settle(run, free, num_bytes=0)
            self.on_failed(keys)
            self._node.publish()
        if len(free) < len(waiting):
            self._later(WITHDRAW_AGAIN_SECONDS, self._withdraw, run, slots, cancelled)

    def _note_failure(self, run: _Run) -> None:
        """Once a request."""
        pushed = self._requests.get(run.request)
        if pushed is not None and not pushed.failed:
            pushed.failed = True
            self.modes.push_failed(pushed.source, self._node.clock.monotonic())

    def _settle(self, run: _Run, slots: Iterable[int], num_bytes: int) -> None:
        """These slots are no longer waited for."""
        done = 0
        for slot in slots:
            del run.waiting[slot]
            if self._by_slot.get(slot) is run:
                del self._by_slot[slot]
            done += 1
        pushed = self._requests.get(run.request)
        if pushed is not None:
            pushed.num_waiting -= done
            pushed.num_bytes += num_bytes
            self._tell(pushed)
        if not run.waiting:
            self._runs.discard(run)
            self._forget(run.timer)
            run.pool.release(run.owner, self._node.clock.monotonic())

    def _tell(self, pushed: _Pushed) -> None:
        """Once a request, when nothing of what it asked for is on its way any more."""
        if pushed.asked_at is None or pushed.num_waiting or pushed.told or pushed.failed:
            return
        pushed.told = True
        now = self._node.clock.monotonic()
        self.modes.observe(pushed.source, "push", pushed.num_bytes, now - pushed.asked_at, now)

    # --- from the server's threads ----------------------------------------------------------

    def _on_landed(self, slot: int, generation: int, checksum: int) -> None:
        self._landed.append(_Landed(slot, generation, checksum))
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        """Make what has landed readable."""
        found: dict[_Run, list[StoredSlot]] = {}
        while self._landed:
            one = self._landed.popleft()
            run = self._by_slot.get(one.slot)
            if run is not None and run.waiting[one.slot][0] == one.generation:
                found.setdefault(run, []).append(StoredSlot(one.slot, one.generation, one.checksum))
        for run, stored in found.items():
            run.pool.complete_store(self._node.clock.monotonic(), stored)
            num_bytes = len(stored) * run.pool.block_bytes
            self._settle(run, [item.slot for item in stored], num_bytes)
        if found:
            self._node.publish()

    def _later(
        self, seconds: float, call: Callable[..., None], *arguments: Any
    ) -> asyncio.TimerHandle:
        assert self._loop is not None, "there is a run"

        def run() -> None:
            self._timers.discard(timer)
            call(*arguments)

        timer = self._loop.call_later(max(0.0, seconds), run)
        self._timers.add(timer)
        return timer

    def _forget(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
            self._timers.discard(timer)
