"""Blocks by RDMA: the engine's side. See `workers.transfer.base` for what endpoints promise."""

from __future__ import annotations

import contextlib
import secrets
import select
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, NamedTuple

import msgspec

from workers.core.errors import ConfigError, ProtocolError, RefusedError
from workers.core.transfer_handshake import NONCE_BYTES, Initiator, StaleIncarnationError
from workers.core.transfer_stats import RdmaRailStats
from workers.core.transfer_types import Cause, Op
from workers.transfer.base import (
    DownBy,
    Endpoint,
    OpenedBy,
    PeerAddress,
    Report,
    SlotMemory,
    Transport,
)
from workers.transfer.rdma.flights import Flights, scratch_bytes
from workers.transfer.rdma.frames import FramedSocket
from workers.transfer.rdma.joining import PortPair
from workers.transfer.rdma.node import RdmaNode
from workers.transfer.rdma.port import Scratch
from workers.transfer.rdma.rail import Rail
from workers.transfer.rdma.setup import Setup, Step
from workers.transfer.rdma.status import Meaning

FLUSH_SECONDS: Final = 0.05
"""For posted requests to come back before their queue pair is destroyed anyway."""
_RETRY_SECONDS: Final = 0.001
BROKEN_SECONDS: Final = 30.0
"""A pair of ports that did not work is passed over for so long, where there are others."""
MAX_SHOWN: Final = 1024


class _Broken(NamedTuple):
    stats: RdmaRailStats
    text: str
    until: float


class RdmaTransport(Transport):
    """`node` is shared with the server, and closed by who made it."""

    name = "rdma"

    def __init__(self, node: RdmaNode, node_id: str, secret: bytes) -> None:
        self.node = node
        self.node_id = node_id
        self._secret = secret
        self._lock = threading.Lock()  # statistics are read in other threads
        self._endpoints: dict[str, RdmaEndpoint] = {}
        self._broken: dict[tuple[str, PortPair], _Broken] = {}

    def connect(self, peer: PeerAddress, incarnation: int) -> Endpoint:
        endpoint = RdmaEndpoint(self, peer, incarnation)
        with self._lock:
            self._endpoints[peer.node_id] = endpoint
            while len(self._endpoints) > MAX_SHOWN:
                del self._endpoints[next(iter(self._endpoints))]
        return endpoint

    def rails(self) -> list[RdmaRailStats]:
        """Paths in use, and those that are passed over because they did not work of late."""
        with self._lock:
            endpoints = list(self._endpoints.items())
            found = [rail for peer, endpoint in endpoints for rail in endpoint.rail_stats(peer)]
            for rail in found:  # what moves bytes works again
                if rail.moved_bytes:
                    self._broken.pop((rail.peer, (rail.port, rail.peer_port)), None)
            broken = list(self._broken_now().values())
        return found + [msgspec.structs.replace(one.stats, error=one.text) for one in broken]

    def broken(self, peer: str) -> set[PortPair]:
        with self._lock:
            return {ports for node, ports in self._broken_now() if node == peer}

    def rail_failed(self, stats: RdmaRailStats, text: str) -> None:
        """Pass this pair of ports over for a while; others carry on."""
        key = stats.peer, (stats.port, stats.peer_port)
        with self._lock:
            self._broken.pop(key, None)
            self._broken[key] = _Broken(stats, text, monotonic() + BROKEN_SECONDS)
            while len(self._broken) > MAX_SHOWN:
                del self._broken[next(iter(self._broken))]

    def _broken_now(self) -> dict[tuple[str, PortPair], _Broken]:
        now = monotonic()
        self._broken = {key: one for key, one in self._broken.items() if one.until > now}
        return self._broken

    def initiator(self, incarnation: int) -> Initiator:
        return Initiator(
            self._secret, self.node_id, self.node.memory.facts,
            secrets.token_bytes(NONCE_BYTES), incarnation,
        )  # fmt: skip


class RdmaEndpoint(Endpoint):
    """One TCP connection for the handshake, which then only tells when the peer is gone, and a
    queue pair for each rail. An error of one of them ends all: new ones are made by a new endpoint,
    after a new handshake."""

    def __init__(self, transport: RdmaTransport, peer: PeerAddress, incarnation: int) -> None:
        self._transport = transport
        self._memory: SlotMemory = transport.node.memory
        self._peer = peer
        self._epoll = select.epoll()
        self._scratch: Scratch | None = None
        self._frames: FramedSocket | None = None
        self._setup: Setup | None = None
        self._flights: Flights | None = None
        self._rails: list[Rail] = []
        self._report = Report()
        self._ended = False
        self._spin_until = 0.0
        self._guard(lambda: self._connect(incarnation))

    # --- the seam ---------------------------------------------------------------------------

    def fileno(self) -> int:
        return -1 if self._ended else self._epoll.fileno()

    def wake_at(self, now: float) -> float | None:
        report = self._report
        if report.completions or report.down is not None:
            return now
        flights = self._flights
        if flights is None:
            return None
        if flights.busy and (now < self._spin_until or not self._all_armed()):
            return now
        return now + _RETRY_SECONDS if flights.owes else None

    def post(self, ops: Sequence[Op]) -> int:
        flights = self._flights
        if flights is None or self._ended:
            return 0
        taken = [0]

        def post() -> None:
            taken[0] = flights.post(ops, self._report)
            self._spin_until = monotonic() + self._transport.node.settings.spin_seconds

        self._guard(post)
        return taken[0]

    def cancel(self, op_ids: Sequence[int]) -> None:
        if self._flights is not None:
            self._flights.cancel(op_ids)

    def poll(self, now: float) -> Report:
        if not self._ended:
            self._guard(lambda: self._move(now))
        report, self._report = self._report, Report()
        return report

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._setup is not None:
            self._setup.close()
        self._flush_all()
        for rail in self._rails:
            rail.pair.close()
        if self._flights is not None:
            self._flights.close()
        self._rails.clear()
        if self._scratch is not None:
            self._scratch.close()
        if self._frames is not None:
            self._frames.close()  # the peer now closes its ends
        self._epoll.close()

    @property
    def rails(self) -> tuple[Rail, ...]:
        """Queue pairs in use; none before it is open and after it is down."""
        return tuple(self._rails)

    def rail_stats(self, peer: str) -> list[RdmaRailStats]:
        """One for each pair of ports. May be called from any thread."""
        found: dict[PortPair, RdmaRailStats] = {}
        for rail in self.rails:
            stats = _stats_of(rail, peer)
            before = found.get((stats.port, stats.peer_port))
            moved = stats.moved_bytes + (before.moved_bytes if before else 0)
            found[stats.port, stats.peer_port] = msgspec.structs.replace(stats, moved_bytes=moved)
        return list(found.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as it should be: off-rail paths, MTUs that differ."""
        return tuple(self._setup.notes) if self._setup is not None else ()

    # --- moving -----------------------------------------------------------------------------

    def _move(self, now: float) -> None:
        """Completions first: where a queue pair broke, they know more than the peer's goodbye."""
        ready = {descriptor for descriptor, _ in self._epoll.poll(0)}
        if self._flights is not None and not self._complete(self._flights, ready, now):
            return
        assert self._frames is not None
        if self._frames.fileno() in ready:
            self._advance()

    def _complete(self, flights: Flights, ready: set[int], now: float) -> bool:
        """False: the endpoint is down."""
        for rail in self._rails:
            if rail.pair.descriptor in ready:
                rail.take_events()
        before = len(self._report.completions)
        flights.poll(self._report)
        if len(self._report.completions) > before:
            self._spin_until = now + self._transport.node.settings.spin_seconds
        if now >= self._spin_until:
            self._arm(flights)
        if flights.failure is not None:
            self._rail_failed(*flights.failure)
            return False
        flights.flush()
        return True

    def _rail_failed(self, rail: Rail, meaning: Meaning) -> None:
        """The path is named: of several rails, the next endpoint passes this one over."""
        text = f"{meaning.name}: {meaning.text}"
        if meaning.of_path:
            text = self._blame(rail, text)
        self._fail(meaning.cause, f"{self._where()}: {text}")

    def _blame(self, rail: Rail, error: str) -> str:
        """The whole text, which the next endpoint and the doctor go by."""
        mine, peer = self._transport.node_id, self._peer.node_id
        text = f"{mine} cannot reach {peer} over {rail.port.name} (to {rail.peer_port}): {error}"
        self._transport.rail_failed(_stats_of(rail, peer), text)
        return text

    def _arm(self, flights: Flights) -> None:
        """What completed between the last poll and this would not be told of: poll once more."""
        for rail in self._rails:
            if not rail.armed:
                rail.arm()
        flights.poll(self._report)

    def _all_armed(self) -> bool:
        return all(rail.armed for rail in self._rails)

    def _advance(self) -> None:
        setup = self._setup
        assert setup is not None
        connecting = setup.step is Step.CONNECTING
        setup.advance()
        if connecting:
            self._epoll.modify(setup.frames.fileno(), select.EPOLLIN)
        if setup.step is Step.DONE and self._flights is None:
            self._open(setup)

    def _open(self, setup: Setup) -> None:
        assert setup.memory is not None
        assert self._scratch is not None
        self._rails, setup.rails = setup.rails, []
        for rail in self._rails:
            self._epoll.register(rail.pair.descriptor, select.EPOLLIN)
        self._flights = Flights(
            self._memory, self._rails, setup.memory, self._scratch,
            self._transport.node.settings.segment_bytes, self._transport.node.slot_nodes,
        )  # fmt: skip
        self._report.opened = OpenedBy(self._flights.depth, setup.initiator.incarnation)

    # --- beginnings and ends ----------------------------------------------------------------

    def _connect(self, incarnation: int) -> None:
        transport = self._transport
        address = self._peer.addresses.get(transport.name, "")
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdigit():
            raise OSError(f"{address!r} is no host:port")
        self._frames = FramedSocket.connecting(host.strip("[]"), int(port))
        self._epoll.register(self._frames.fileno(), select.EPOLLOUT)
        self._scratch = Scratch(scratch_bytes(self._memory.slab.header_bytes))
        self._setup = Setup(
            transport.node, transport.node_id, self._peer.node_id,
            transport.initiator(incarnation), self._scratch, self._frames,
            transport.broken(self._peer.node_id), self._blame,
        )  # fmt: skip

    def _flush_all(self) -> None:
        """Posted requests come back as flushed: then the device is done with our memory."""
        for rail in self._rails:
            rail.pair.fail()
        deadline = monotonic() + FLUSH_SECONDS
        waiting = [rail for rail in self._rails if rail.queue.outstanding]
        while waiting and monotonic() < deadline:
            with contextlib.suppress(OSError):
                for rail in waiting:
                    for done in rail.pair.poll():
                        if not done.received:
                            rail.queue.complete(done.wr_id, ok=False)
            waiting = [rail for rail in waiting if rail.queue.outstanding]

    def _guard(self, call: Callable[[], object]) -> None:
        """Errors become the end of the endpoint."""
        try:
            call()
        except StaleIncarnationError as error:
            self._fail(Cause.INCARNATION, str(error), error.actual)
        except RefusedError as error:
            stale = error.code == "incarnation"
            self._fail(Cause.INCARNATION if stale else Cause.REFUSED, f"{error.code}: {error}")
        except ConfigError as error:  # the peer offers no port that ours could speak to
            self._fail(Cause.REFUSED, str(error))
        except (OSError, EOFError, ProtocolError, ValueError) as error:
            self._fail(Cause.CONNECTION, f"{self._where()}: {error}")

    def _where(self) -> str:
        address = self._peer.addresses.get(self._transport.name, "(no address)")
        return f"{self._peer.node_id} at {address}"

    def _fail(self, cause: Cause, text: str, incarnation: int = 0) -> None:
        self._report.down = DownBy(cause, text, incarnation)
        self.close()


def _stats_of(rail: Rail, peer: str) -> RdmaRailStats:
    return RdmaRailStats(
        peer, rail.port.name, rail.peer_port, rail.off_rail, rail.mtu, rail.moved_bytes
    )
