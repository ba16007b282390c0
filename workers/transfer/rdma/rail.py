"""One queue pair of ours with a peer's: what is posted on it, and what of it is done."""

from __future__ import annotations

from typing import NamedTuple

from workers.transfer.rdma.control import Sent
from workers.transfer.rdma.port import OpenPort, Registered
from workers.transfer.rdma.queue_pair import Done, QueuePair
from workers.transfer.rdma.send_queue import OP_READ, OP_WRITE, Buffer, SendQueue
from workers.transfer.rdma.status import SUCCESS, Meaning, meaning_of


class Segment(NamedTuple):
    """A part of an op: bytes between a remote address and a place in the memory registered here,
    counted from its start. `header`: the remote slot's, which lies right before, is to be read too, to
    that local address."""

    op_id: int
    local: int
    remote: int
    length: int
    write: bool
    header: int = 0
    header_bytes: int = 0

    @property
    def opcode(self) -> int:
        return OP_WRITE if self.write else OP_READ


class Marker(NamedTuple):
    """Says only that what was posted before it is done."""


Token = Segment | Sent | Marker


class Found(NamedTuple):
    """What a poll of a rail brought."""

    done: list[Token]
    received: list[Done]
    failure: Meaning | None


class Rail:
    """`remote_*` is the peer's registered memory; `base` the address of slot 0's header there."""

    def __init__(
        self,
        port: OpenPort,
        region: Registered,
        pair: QueuePair,
        scratch_lkey: int,
        *,
        peer_port: str = "",
        mtu: int = 0,
        off_rail: bool = False,
    ) -> None:
        self.port = port
        self.peer_port = peer_port
        self.mtu = mtu
        self.pair = pair
        self.queue: SendQueue[Token] = SendQueue(
            pair.queues.send_requests, pair.queues.segments, pair
        )
        self.rkey = 0
        self.off_rail = off_rail
        self.armed = False
        self.moved_bytes = 0
        self._region = region
        self._scratch_lkey = scratch_lkey
        self._owes_marker = False

    @property
    def owes(self) -> bool:
        return self._owes_marker or self.queue.staged > 0

    def stage(self, segment: Segment, *, far: bool = False) -> None:
        """`queue.room` was looked at. `far`: the slot lies at another memory node than the port."""
        self.port.counters.off_numa_bytes += segment.length * far
        here = self._region.address + segment.local
        buffers: tuple[Buffer, ...] = (Buffer(here, segment.length, self._region.lkey),)
        remote = segment.remote
        if segment.header:
            head = Buffer(segment.header, segment.header_bytes, self._scratch_lkey)
            buffers, remote = (head, *buffers), remote - segment.header_bytes
        self.queue.stage(segment, segment.opcode, buffers, remote=remote, rkey=self.rkey)

    def flush(self) -> list[Token]:
        """Post the chain; what the device did not take, in order."""
        staged = self.queue.staged
        if not staged:
            return []
        left = self.queue.submit()
        self.port.counters.posts += 1
        self.port.counters.work_requests += staged - len(left)
        self._owes_marker = bool(left) and not self.queue.settle(Marker())
        return left

    def poll(self) -> Found:
        """Completions that are here. After a failure the queue pair is in ERR."""
        done: list[Token] = []
        received: list[Done] = []
        failure: Meaning | None = None
        while found := self.pair.poll():
            for entry in found:
                ok = entry.status == SUCCESS
                if not ok and failure is None:
                    failure = meaning_of(entry.status)
                if entry.received:
                    received += [entry] if ok else []
                    continue
                tokens, _ = self.queue.complete(entry.wr_id, ok=ok)
                done += tokens
        if self._owes_marker:
            self._owes_marker = not self.queue.settle(Marker())
        self._count(done, failure)
        return Found(done, received, failure)

    def arm(self) -> None:
        self.pair.arm()
        self.armed = True

    def take_events(self) -> None:
        self.pair.take_events()
        self.armed = False

    def _count(self, done: list[Token], failure: Meaning | None) -> None:
        read = written = 0
        for token in done:
            if type(token) is Segment:
                if token.write:
                    written += token.length
                else:
                    read += token.length
        counters = self.port.counters
        self.moved_bytes += read + written
        counters.read_bytes += read
        counters.written_bytes += written
        counters.off_rail_bytes += (read + written) * self.off_rail
        counters.errors += failure is not None
