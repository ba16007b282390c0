"""The engine: performs what `Transfers` decides, over endpoints, in one thread.

engine = TransferEngine("n1", memory, [TcpTransport(...), ShmTransport(...)])
engine.start()                                   # or drive it by `run`
engine.set_peer(PeerAddress("n2", {"tcp": "10.0.0.2:7720"}, incarnation))
future = engine.submit(TransferRequest(...))     # asyncio: await asyncio.wrap_future(future)
result = future.result()                         # every piece is in place, or in `missing`
engine.close()
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from workers.clock import SystemClock
from workers.core.clock import Clock
from workers.core.transfer_choice import Cost, CostModel
from workers.core.transfer_pacing import CAP_SHARE
from workers.core.transfer_state import Transfers
from workers.core.transfer_stats import LinkStats, PairKey, TransferLedger, TransferStats
from workers.core.transfer_types import (
    Alarm,
    Arrived,
    CancelOps,
    CancelRequested,
    CapRule,
    CapSet,
    Cause,
    Close,
    Command,
    Completed,
    Direction,
    Down,
    Event,
    Finish,
    LimitsSet,
    LinkId,
    Op,
    Open,
    Opened,
    Post,
    Posted,
    Progressed,
    Seal,
    Sealed,
    Submitted,
    Ticked,
    TransferLimits,
    TransferRequest,
    TransferResult,
)
from workers.pool.arena import checksum_of
from workers.transfer.base import DownBy, Endpoint, PeerAddress, SlotMemory, Transport
from workers.transfer.choosing import Chooser, PairWay

OnArrived = Callable[[list[int]], None]
MAX_PEERS: Final = 1024
_LONGEST_WAIT_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


class TransferEngine:
    """`submit`, `cancel`, `set_peer`, `set_cap` and `stats` may be called from any thread."""

    def __init__(
        self,
        node_id: str,
        memory: SlotMemory,
        transports: Sequence[Transport],
        *,
        limits: TransferLimits | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.node_id = node_id
        self.memory = memory
        self.transports = {transport.name: transport for transport in transports}
        self.chooser = Chooser(self.transports)
        self.clock: Clock = clock or SystemClock()
        self._state = Transfers(limits or TransferLimits(), (rng or random.Random()).random)  # noqa: S311
        self._ledger = TransferLedger(node_id)
        self._peers: dict[str, PeerAddress] = {}
        self._endpoints: dict[LinkId, Endpoint] = {}
        self._descriptors: dict[int, LinkId] = {}
        self._futures: dict[str, Future[TransferResult]] = {}
        self._on_arrived: dict[str, OnArrived] = {}
        self._alarms: dict[LinkId, str] = {}
        self._inbox: deque[Event] = deque()
        self._lock = threading.Lock()  # what callers share; held for moments only
        self._step_lock = threading.RLock()  # the state machine and its endpoints
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread: threading.Thread | None = None
        self._closing = False

    # --- callers ----------------------------------------------------------------------------

    def set_peer(self, peer: PeerAddress) -> None:
        """Make a peer known, or known by other addresses. Of too many, the one that was not set for
        longest is forgotten: names of nodes come and go."""
        with self._lock:
            self._peers.pop(peer.node_id, None)
            self._peers[peer.node_id] = peer
            if len(self._peers) > MAX_PEERS:
                del self._peers[next(iter(self._peers))]

    def forget_peer(self, node_id: str) -> None:
        with self._lock:
            self._peers.pop(node_id, None)

    def add_transport(self, transport: Transport) -> None:
        """One more way, from now on; of a name that is not there yet."""
        with self._lock:
            self.transports.setdefault(transport.name, transport)

    def other_way(self, request: TransferRequest, failed: str) -> str | None:
        """What would be chosen now, where it is another than the one that has just failed."""
        with self._lock:
            peer = self._peers.get(request.peer)
            now = self.clock.monotonic()
            chosen = None if peer is None else self.chooser.find(peer, request, now)
        return chosen if chosen != failed else None

    @property
    def costs(self) -> CostModel:
        return self.chooser.costs

    def best_cost(self, peer: str, direction: Direction, unmeasured: Cost | None = None) -> Cost:
        """As measured, of the cheapest path to that peer; a prior where nothing is known, or what
        stands for TCP in that case."""
        with self._lock:
            address = self._peers.get(peer)
            return self.chooser.best_cost(address, direction, self.clock.monotonic(), unmeasured)

    def override(
        self, peer: str, transport: str | None, direction: Direction = Direction.PULL
    ) -> None:
        """Use this transport for that peer, whatever it costs; None: choose again. ValueError."""
        with self._lock:
            self.chooser.override(peer, transport, direction)

    def configure(
        self, limits: TransferLimits, cap: CapRule, overrides: Mapping[PairWay, str]
    ) -> None:
        """Other bounds, caps and transports from now on, for what is under way too."""
        with self._lock:
            self.chooser.replace_overrides(overrides)
        self._inbox.append(LimitsSet(limits, cap))
        self._ring()

    def submit(
        self,
        request: TransferRequest,
        *,
        transport: str | None = None,
        among: Collection[str] | None = None,
        on_arrived: OnArrived | None = None,
    ) -> Future[TransferResult]:
        """Start a transfer. It ends at its deadline at the latest, or shortly after.

        Cancelling the future cancels the transfer; but only a result says that nothing writes into
        its slots any more, so `cancel` and wait where they are to be used again.
        `on_arrived` is told, in the engine's thread, which pieces of partly asked-for blocks are
        there: it must not wait. ValueError: the request makes no sense, or its peer is unknown.
        """
        future: Future[TransferResult] = Future()
        with self._lock:
            if self._closing:
                raise ValueError("the transfer engine is closed")
            if request.transfer_id in self._futures:
                raise ValueError(f"transfer {request.transfer_id}: there is one of that name")
            now = self.clock.monotonic()
            peer = self._peers.get(request.peer)
            chosen = transport or self.chooser.choose(peer, request, now, among)
            self.chooser.used(LinkId(request.peer, chosen), request.direction)
            self._futures[request.transfer_id] = future
            if on_arrived is not None:
                self._on_arrived[request.transfer_id] = on_arrived
            self._inbox.append(Submitted(request, chosen))
        future.add_done_callback(partial(self._abandoned, request.transfer_id))
        self._ring()
        return future

    def cancel(self, transfer_id: str) -> None:
        """Give a transfer up; its future still gets a result, when nothing writes any more."""
        self._inbox.append(CancelRequested(transfer_id))
        self._ring()

    def set_cap(self, link: LinkId, bytes_per_second: float | None = None) -> float:
        """Cap a link; without a rate, at 40 % of its measured (or expected) bandwidth. The rate;
        0 lifts the cap."""
        if bytes_per_second is None:
            cost = self.costs.cost(link, self.clock.monotonic())
            bytes_per_second = CAP_SHARE * cost.bytes_per_second
        self._inbox.append(CapSet(link, bytes_per_second))
        self._ring()
        return bytes_per_second

    def run(self, request: TransferRequest, *, transport: str | None = None) -> TransferResult:
        """A transfer from start to end; without `start`, in the caller's thread."""
        future = self.submit(request, transport=transport)
        if self._thread is not None:
            return future.result()
        while not future.done():
            self.step(_LONGEST_WAIT_SECONDS)
        return future.result()

    def start(self) -> None:
        """Run in a thread of its own, until `close`."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._loop, name="transfers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all transfers and endpoints; the memory is left alone from then on. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._ring()
        if self._thread is not None:
            self._thread.join(timeout=10)
        with self._step_lock:
            for link in list(self._endpoints):
                self._close_endpoint(link)
            with self._lock:
                futures, self._futures = list(self._futures.values()), {}
            for future in futures:
                future.cancel()
            self._epoll.close()
            os.close(self._wake)
            self._wake = -1
        for transport in self.transports.values():
            transport.close()

    def stats(self) -> TransferStats:
        """A copy, to be reported. Waits for a step under way: some milliseconds."""
        with self._step_lock:
            in_flight: dict[PairKey, int] = {}
            for job in self._state.jobs.values():
                request = job.request
                key = self._ledger.key_of(*job.link, request.priority, request.direction)
                in_flight[key] = in_flight.get(key, 0) + 1
            pairs = self._ledger.report(in_flight)
            links = [self._link_stats(link) for link in self._state.links]
            now = self.clock.monotonic()
            return TransferStats(pairs, links, list(self._alarms.values()), at=now)

    # --- the loop ---------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closing:
            try:
                self.step(_LONGEST_WAIT_SECONDS)
            except Exception:
                _log.exception("a step of the transfer engine failed")
                threading.Event().wait(0.1)

    def step(self, timeout: float) -> None:
        """Wait for something to do, at most `timeout` seconds, and do it."""
        ready = self._wait(timeout)
        with self._step_lock:
            now = self.clock.monotonic()
            for link, endpoint in list(self._endpoints.items()):
                at = endpoint.wake_at(now)
                if link in ready or (at is not None and at <= now):
                    self._poll(link, endpoint, now)
            self._take_inbox()
            self._handle(Ticked())

    def _wait(self, timeout: float) -> set[LinkId]:
        with self._step_lock:
            now = self.clock.monotonic()
            times = [now + timeout]
            if self._inbox:
                times.append(now)
            if (at := self._state.next_wake(now)) is not None:
                times.append(at)
            wakes = (endpoint.wake_at(now) for endpoint in self._endpoints.values())
            times += [at for at in wakes if at is not None]
        pause = max(0.0, min(times) - now)
        ready: set[LinkId] = set()
        for descriptor, _ in self._epoll.poll(pause):
            if descriptor == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif descriptor in self._descriptors:
                ready.add(self._descriptors[descriptor])
        return ready

    def _take_inbox(self) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            try:
                self._handle(event)
            except ValueError as error:
                if isinstance(event, Submitted):
                    self._settle(event.request.transfer_id, error)

    def _poll(self, link: LinkId, endpoint: Endpoint, now: float) -> None:
        report = endpoint.poll(now)
        if report.opened is not None:
            self._handle(Opened(link, report.opened.depth, report.opened.incarnation))
        if report.completions:
            self._handle(Completed(link, report.completions))
        elif report.moved_bytes:
            self._handle(Progressed(link))
        if report.down is not None and self._endpoints.get(link) is endpoint:
            self._close_endpoint(link)
            self._handle(_down(link, report.down))

    def _handle(self, event: Event) -> None:
        commands = deque(self._state.handle(event, self.clock.monotonic()))
        while commands:
            answer = self._perform(commands.popleft())
            if answer is not None:
                commands.extend(self._state.handle(answer, self.clock.monotonic()))

    def _perform(self, command: Command) -> Event | None:
        match command:
            case Post(link, ops):
                return self._post(link, ops)
            case Seal():
                return self._seal(command)
            case Open(link, incarnation):
                return self._open(link, incarnation)
            case Close(link):
                self._close_endpoint(link)
            case CancelOps(link, op_ids):
                if (endpoint := self._endpoints.get(link)) is not None:
                    endpoint.cancel(op_ids)
            case Finish() | Arrived() | Alarm():
                self._tell(command)
        return None

    def _tell(self, command: Finish | Arrived | Alarm) -> None:
        match command:
            case Finish(result):
                self._finish(result)
            case Arrived(transfer_id, indices):
                if (tell := self._on_arrived.get(transfer_id)) is not None:
                    tell(indices)
            case Alarm():
                self._alarm(command)

    # --- commands ---------------------------------------------------------------------------

    def _post(self, link: LinkId, ops: list[Op]) -> Posted:
        endpoint = self._endpoints.get(link)
        slab = self.memory.slab
        for op in ops:
            if op.direction is Direction.PULL and 0 <= op.piece.local_slot < slab.num_slots:
                slab.begin_write(op.piece.local_slot)
        accepted = 0 if endpoint is None else endpoint.post(ops)
        return Posted(link, [op.id for op in ops], accepted)

    def _seal(self, command: Seal) -> Sealed | None:
        piece, slab = command.piece, self.memory.slab
        started = self.clock.monotonic()
        ok = command.verified or command.checksum == checksum_of(
            slab.payload(piece.local_slot, piece.block_length)
        )
        if ok:
            slab.write_header(
                piece.local_slot, piece.local_generation, piece.block_length,
                command.checksum, piece.key,
            )  # fmt: skip
        if command.verified:
            return None
        seconds = self.clock.monotonic() - started
        return Sealed(command.transfer_id, piece.local_slot, ok, seconds)

    def _finish(self, result: TransferResult) -> None:
        now = self.clock.monotonic()
        self._ledger.record(result, now)
        timing = result.timing
        if not result.missing:
            self.costs.observe(result.link, result.num_bytes, timing.wire + timing.verify, now)
        elif result.breaks_link:
            self.costs.failed(result.link, now)
        self._settle(result.transfer_id, result)

    def _settle(self, transfer_id: str, outcome: TransferResult | ValueError) -> None:
        future = self._futures.pop(transfer_id, None)
        self._on_arrived.pop(transfer_id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, ValueError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _open(self, link: LinkId, incarnation: int) -> Down | None:
        peer, transport = self._peers.get(link.peer), self.transports[link.transport]
        if peer is None:
            return Down(link, Cause.CONNECTION, f"no address of {link.peer} is known any more")
        self._close_endpoint(link)
        endpoint = transport.connect(peer, incarnation)
        self._endpoints[link] = endpoint
        descriptor = endpoint.fileno()
        if descriptor >= 0:
            self._epoll.register(descriptor, select.EPOLLIN)
            self._descriptors[descriptor] = link
        return None

    def _close_endpoint(self, link: LinkId) -> None:
        endpoint = self._endpoints.pop(link, None)
        if endpoint is None:
            return
        for descriptor, owner in list(self._descriptors.items()):
            if owner == link:
                del self._descriptors[descriptor]
                with contextlib.suppress(OSError):  # it closed itself when it went down
                    self._epoll.unregister(descriptor)
        endpoint.close()

    def _alarm(self, alarm: Alarm) -> None:
        peer, transport = alarm.link
        if not alarm.raised:
            self._alarms.pop(alarm.link, None)
            _log.info("transfers with %s by %s: %s", peer, transport, alarm.text)
            return
        text = f"no transfers with {peer} by {transport}: {alarm.text}"
        self._alarms[alarm.link] = text
        _log.warning("%s", text)

    def _abandoned(self, transfer_id: str, future: Future[TransferResult]) -> None:
        if future.cancelled() and not self._closing:
            self.cancel(transfer_id)

    # --- helpers ----------------------------------------------------------------------------

    def _link_stats(self, link_id: LinkId) -> LinkStats:
        link = self._state.links[link_id]
        cost = self.costs.measured(link_id)
        with self._lock:
            peer = self._peers.get(link_id.peer)
            judged = self.chooser.judge(peer, link_id, self.clock.monotonic())
        return LinkStats(
            link_id.peer, link_id.transport, link.state.value, link.breaker.state.value,
            link.window_ops, len(link.flights), link.flying_bytes, link.opens, link.small_ops,
            link.budget.spent_bytes, link.budget.exhausted, link.late, link.bucket.rate,
            cost.latency_seconds if cost else None, cost.bytes_per_second if cost else None,
            link.last_error, judged.chosen, judged.override, judged.seconds, judged.why,
            link.best_rate or None,
        )  # fmt: skip

    def _ring(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake, 1)


def _down(link: LinkId, down: DownBy) -> Down:
    return Down(link, down.cause, down.text, down.incarnation)
