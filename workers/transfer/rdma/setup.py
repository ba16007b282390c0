"""The initiator's way to connected queue pairs, one step at a time, never waiting."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import NamedTuple

from workers.core.errors import ProtocolError, RefusedError
from workers.core.messages import Refused
from workers.core.rdma_choice import choose_mtu
from workers.core.transfer_handshake import Initiator, SlabFacts
from workers.transfer.rdma import joining
from workers.transfer.rdma.frames import FramedSocket
from workers.transfer.rdma.joining import PortPair
from workers.transfer.rdma.node import RdmaNode
from workers.transfer.rdma.port import Scratch
from workers.transfer.rdma.rail import Rail

_log = logging.getLogger(__name__)


class Step(StrEnum):
    CONNECTING = "connecting"
    SHAKING = "shaking"
    JOINING = "joining"
    DONE = "done"


class PeerMemory(NamedTuple):
    """The peer's slab as its device knows it."""

    base: int
    num_bytes: int
    facts: SlabFacts
    depth: int
    remote_write: bool


RailFailed = Callable[[Rail, str], object]
"""A path of several does not work, and why."""


class _End(NamedTuple):
    """A queue pair of ours that waits for its other end."""

    rail: Rail
    psn: int
    reads: int


class Setup:
    """`advance` when the socket is ready. Raises RefusedError, OSError, EOFError, ProtocolError.

    The rails stay its own until `take_rails`: `close` closes them.
    """

    def __init__(
        self, node: RdmaNode, me: str, peer: str, initiator: Initiator, scratch: Scratch,
        frames: FramedSocket, broken: Collection[PortPair], rail_failed: RailFailed,
    ) -> None:  # fmt: skip
        """`broken`: pairs of ports that are passed over, where there are others."""
        self.frames = frames
        self.step = Step.CONNECTING
        self.memory: PeerMemory | None = None
        self.initiator = initiator
        self.notes: list[str] = []
        self.rails: list[Rail] = []
        self._node = node
        self._me = me
        self._peer = peer
        self._scratch = scratch
        self._broken = broken
        self._rail_failed = rail_failed
        self._ends: list[_End] = []
        self._offer: joining.Offer | None = None

    def advance(self) -> None:
        if self.step is Step.CONNECTING:
            self.frames.connected()
            self.frames.send(self.initiator.start())
            self.step = Step.SHAKING
            return
        for document in self.frames.receive():
            if self.step is Step.SHAKING:
                self._shake(document)
            elif self.step is Step.JOINING:
                self._joined(document)
            else:
                raise ProtocolError("a document after the connection was made")

    def close(self) -> None:
        while self.rails:
            self.rails.pop().pair.close()

    def _shake(self, document: bytes) -> None:
        reply = self.initiator.receive(document)
        if reply is not None:
            self.frames.send(reply)
        accepted = self.initiator.accepted
        if accepted is None:
            return
        self._offer = joining.read_offer(accepted.extra, self._peer)
        self._make_rails(self._offer)
        self.step = Step.JOINING

    def _make_rails(self, offer: joining.Offer) -> None:
        node = self._node
        choice = joining.plan_rails(
            node.ports, offer, self._me, self._peer, node.settings.queue_pairs, self._broken
        )
        self.notes += choice.warnings
        asks = []
        for rail in choice.rails:
            port, theirs = node.ports[rail.mine], offer.ports[rail.theirs]
            mtu = choose_mtu(port.active_mtu, theirs.mtu, self._me, self._peer)
            if mtu.statement:
                self.notes.append(f"{port.name}: {mtu.statement}")
            pair = port.queue_pair(port.queues, remote_read=False, remote_write=False)
            lkey = self._scratch.register(port)
            made = Rail(
                port, node.regions[rail.mine], pair, lkey,
                peer_port=theirs.port.name, mtu=mtu.mtu, off_rail=rail.off_rail,
            )  # fmt: skip
            self.rails.append(made)
            psn = secrets.randbits(24)
            reads = min(port.queues.reads, max(1, theirs.reads))
            self._ends.append(_End(made, psn, reads))
            asks.append(
                joining.RailAsk(rail.theirs, pair.address(psn), port.active_mtu, port.queues.reads)
            )
        for note in self.notes:
            _log.warning("RDMA with %s: %s", self._peer, note)
        self.frames.send(joining.encode(joining.Join(asks)))

    def _joined(self, document: bytes) -> None:
        message = joining.decode(document)
        if isinstance(message, Refused):
            raise RefusedError(message.code, message.message)
        if not isinstance(message, joining.Joined) or len(message.rails) != len(self.rails):
            raise ProtocolError(
                f"{type(message).__name__} where Joined was due, or its rails differ"
            )
        accepted = self.initiator.accepted
        assert accepted is not None
        assert self._offer is not None
        facts = accepted.facts
        if message.num_bytes < facts.num_slots * facts.slot_bytes:
            raise ProtocolError(f"{message.num_bytes} bytes hold no {facts.num_slots} slots")
        for end, grant in zip(self._ends, message.rails, strict=True):
            if grant.error:
                self._leave_out(end.rail, grant.error)
            else:
                self._connect(end, grant)
        if not self.rails:
            raise OSError(f"no queue pair with {self._peer}: {message.rails[0].error}")
        self.memory = PeerMemory(
            message.base, message.num_bytes, facts, accepted.depth, self._offer.remote_write
        )
        self.step = Step.DONE

    def _connect(self, end: _End, grant: joining.RailGrant) -> None:
        """OSError: the peer counts on this one, so all begins anew, without it where there are more."""
        rail = end.rail
        try:
            rail.pair.connect(grant.address, psn=end.psn, mtu=rail.mtu, reads=end.reads)
        except OSError as error:
            self._rail_failed(rail, str(error))
            raise
        rail.rkey = grant.rkey

    def _leave_out(self, rail: Rail, error: str) -> None:
        self._rail_failed(rail, error)
        self.notes.append(f"{rail.port.name} is left out: {error}")
        self.rails.remove(rail)
        rail.pair.close()
