"""Ops in flight: cut into segments, spread over rails, verified when all of them are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from workers.core.errors import ProtocolError
from workers.core.rdma_choice import pick_rail
from workers.core.transfer_types import Cause, Completion, Direction, Op
from workers.core.transfer_verify import Found, Wanted, in_bounds, judge_source
from workers.pool.arena import Slab, checksum_of
from workers.transfer import tcp_wire as wire
from workers.transfer.base import Report, SlotMemory
from workers.transfer.rdma import control
from workers.transfer.rdma.control import Mailbox, Sent
from workers.transfer.rdma.port import Scratch
from workers.transfer.rdma.rail import Marker, Rail, Segment, Token
from workers.transfer.rdma.setup import PeerMemory
from workers.transfer.rdma.status import Meaning

HEADERS: Final = 1024
"""Slots for headers that are read: whole blocks in flight at most."""


@dataclass(slots=True, eq=False)
class Flight:
    """An op and what it still waits for: its segments, an answer, or both."""

    op: Op
    left: int
    header: int = -1
    answer: wire.Answer | None = None
    cancelled: bool = False


def scratch_bytes(header_bytes: int) -> int:
    return HEADERS * header_bytes + Mailbox.num_bytes()


class Flights:
    """All ops of one endpoint. `post` and `poll` as in the seam; the rails have been connected."""

    def __init__(
        self,
        memory: SlotMemory,
        rails: Sequence[Rail],
        peer: PeerMemory,
        scratch: Scratch,
        segment_bytes: int,
    ) -> None:
        self._memory = memory
        self._rails = rails
        self._peer = peer
        self._segment_bytes = segment_bytes
        self._flying: dict[int, Flight] = {}
        self._backlog: deque[Token] = deque()
        self._free_headers = deque(range(HEADERS))
        self._headers = Slab(scratch.memory, memory.slab.header_bytes, memory.slab.header_bytes)
        self._headers_address = scratch.address
        lkey = scratch.register(rails[0].port)
        offset = HEADERS * memory.slab.header_bytes
        self._mailbox = Mailbox(rails[0].pair, rails[0].queue, scratch, lkey, offset)
        self._mailbox.post_receives(rails[0].port.verbs.wr)
        self._asks: dict[int, list[bytes]] = {kind: [] for kind in control.KINDS}
        self._unanswered = 0
        self.failure: Meaning | None = None
        self.depth = min(
            peer.depth, HEADERS, sum(rail.pair.queues.send_requests for rail in rails) // 2
        )

    @property
    def busy(self) -> bool:
        return bool(self._flying)

    @property
    def owes(self) -> bool:
        """The device must be asked again, though nothing will tell when."""
        return bool(self._backlog) or any(rail.owes for rail in self._rails)

    # --- out --------------------------------------------------------------------------------

    def post(self, ops: Sequence[Op], report: Report) -> int:
        """OSError: the device refuses."""
        count = 0
        for op in ops:
            if len(self._flying) >= self.depth or self._backlog or not self._start(op, report):
                break
            count += 1
        self.flush()
        return count

    def flush(self) -> None:
        """Send what has gathered: messages, then chains."""
        self._drain()
        for kind, entries in self._asks.items():
            while entries and self._unanswered < control.SLOTS:
                part = entries[: control.MAX_ENTRIES]
                del entries[: control.MAX_ENTRIES]
                self._mailbox.put(control.pack(kind, part))
                self._unanswered += 1
        self._mailbox.pump()
        for rail in self._rails:
            left = rail.flush()
            for token in left:  # of several rails: each keeps its order, which is all that counts
                if isinstance(token, Sent):
                    self._mailbox.restage(token)
                else:
                    self._backlog.append(token)

    def cancel(self, op_ids: Sequence[int]) -> None:
        """What the device has is let land, which takes no longer; what has not begun is dropped."""
        for op_id in op_ids:
            if (flight := self._flying.get(op_id)) is not None:
                flight.cancelled = True

    def _start(self, op: Op, report: Report) -> bool:
        cause = self._judge(op)
        if cause is not None:
            report.completions.append(Completion(op.id, cause))
            return True
        if op.direction is Direction.PUSH:
            return self._start_push(op)
        return self._start_pull(op)

    def _judge(self, op: Op) -> Cause | None:
        """Beyond the peer's memory its device would break the connection: look before."""
        piece, memory, facts = op.piece, self._memory, self._peer.facts
        local, remote = _wanted(op, local=True), _wanted(op, local=False)
        payload = facts.slot_bytes - facts.header_bytes
        if not in_bounds(local, memory.num_slots, memory.payload_bytes):
            return Cause.BOUNDS
        if not in_bounds(remote, facts.num_slots, payload):
            return Cause.BOUNDS
        if op.direction is Direction.PULL:
            return None
        if not self._peer.remote_write:
            return Cause.REFUSED
        return judge_source(local, memory.found(piece.local_slot))

    def _start_pull(self, op: Op) -> bool:
        segments = self._cut(op)
        if self._room() < len(segments) or (op.whole and not self._free_headers):
            return False
        flight = Flight(op, len(segments))
        if op.whole:
            flight.header = self._free_headers.popleft()
            self._headers.begin_write(flight.header)
            size = self._memory.slab.header_bytes
            segments[0] = segments[0]._replace(
                header=self._headers_address + flight.header * size, header_bytes=size
            )
        elif not self._may_ask():
            return False
        else:
            flight.left += 1
            self._asks[control.SUM].append(_read_entry(op))
        self._flying[op.id] = flight
        self._backlog.extend(segments)
        self._drain()
        return True

    def _start_push(self, op: Op) -> bool:
        found = self._memory.found(op.piece.local_slot)
        if found is None or not self._may_ask():
            return False
        self._flying[op.id] = Flight(op, 1)
        self._asks[control.CLAIM].append(_write_entry(op, found))
        return True

    def _may_ask(self) -> bool:
        waiting = sum(map(len, self._asks.values()))
        return waiting < control.MAX_ENTRIES * max(1, control.SLOTS - self._unanswered)

    def _cut(self, op: Op) -> list[Segment]:
        memory, facts = self._memory, self._peer.facts
        remote = self._peer.base + op.piece.remote_slot * facts.slot_bytes + facts.header_bytes
        local = memory.address + op.piece.local_slot * memory.slab.slot_bytes
        local += memory.slab.header_bytes
        write = op.direction is Direction.PUSH
        smallest = min(rail.queue.slots for rail in self._rails)
        size = max(self._segment_bytes, -(-op.length // (smallest // 2)))
        return [
            Segment(op.id, local + at, remote + at, min(size, op.offset + op.length - at), write)
            for at in range(op.offset, op.offset + op.length, size)
        ]

    def _room(self) -> int:
        return sum(max(0, rail.queue.room - 1) for rail in self._rails)

    def _drain(self) -> None:
        """Stage what waits, on the rail that will be free first. A slot of each is left for
        messages."""
        rails = self._rails
        while self._backlog:
            room = [max(0, rail.queue.room - 1) for rail in rails]
            index = 0
            if len(rails) > 1 or not room[0]:
                load = [rail.queue.outstanding_bytes for rail in rails]
                index = pick_rail(load, [rail.port.port.gbps for rail in rails], room)
            if index < 0:
                return
            token = self._backlog.popleft()
            if isinstance(token, Segment):
                rails[index].stage(token)

    # --- in ---------------------------------------------------------------------------------

    def poll(self, report: Report) -> None:
        """Take completions of all rails. `failure` is set when one of them broke."""
        for rail in self._rails:
            found = rail.poll()
            for token in found.done:
                self._done(token, report)
            for entry in found.received:
                self._answered(self._mailbox.receive(entry), report)
            if found.failure is not None and self.failure is None:
                self.failure = found.failure

    def _done(self, token: Token, report: Report) -> None:
        match token:
            case Segment():
                report.moved_bytes += token.length
                flight = self._flying.get(token.op_id)
                assert flight is not None, "a segment without its op"
                self._one_less(flight, report)
            case Sent():
                self._mailbox.sent(token)
            case Marker():
                pass

    def _one_less(self, flight: Flight, report: Report) -> None:
        flight.left -= 1
        if flight.left:
            return
        if flight.op.direction is Direction.PULL:
            self._end(flight, self._verify(flight), report)
        else:  # all bytes of a push are there
            self._ask_more(flight, control.COMMIT)

    def _ask_more(self, flight: Flight, kind: int) -> None:
        flight.left = 1
        self._asks[kind].append(control.OP_ID.pack(flight.op.id))

    def _verify(self, flight: Flight) -> Completion:
        op = flight.op
        if flight.answer is not None:
            if flight.answer.cause is not None:
                return Completion(op.id, flight.answer.cause)
            checksum, expected = flight.answer.checksum, flight.answer.range_checksum
        else:
            header = self._headers.read_header(flight.header)
            found = None
            if header is not None:
                found = Found(header.generation, header.key, header.length, header.checksum)
            cause = judge_source(_wanted(op, local=False), found)
            if cause is not None or found is None:
                return Completion(op.id, cause)
            checksum = expected = found.checksum
        started = perf_counter()
        digest = checksum_of(self._memory.range(op.piece.local_slot, op.offset, op.length))
        cause = None if digest == expected else Cause.CORRUPT
        return Completion(op.id, cause, checksum, perf_counter() - started)

    def _answered(self, message: bytes, report: Report) -> None:
        kind, count, body = control.unpack(message)
        if len(body) != count * wire.REPLY_ENTRY.size or not self._unanswered:
            raise ProtocolError(f"an answer of {len(body)} bytes to {count} questions")
        self._unanswered -= 1
        for answer in wire.unpack_answers(body):
            flight = self._flying.get(answer.op_id)
            if flight is None:
                raise ProtocolError(f"an answer about op {answer.op_id}, which is not in flight")
            if kind == control.SUM:
                flight.answer = answer
                self._one_less(flight, report)
            elif kind == control.CLAIM and answer.cause is None:
                self._claimed(flight)
            else:
                self._end(flight, Completion(answer.op_id, answer.cause, answer.checksum), report)

    def _claimed(self, flight: Flight) -> None:
        if flight.cancelled:
            self._ask_more(flight, control.ABANDON)
            return
        segments = self._cut(flight.op)
        flight.left = len(segments)
        self._backlog.extend(segments)

    def _end(self, flight: Flight, completion: Completion, report: Report) -> None:
        del self._flying[flight.op.id]
        if flight.header >= 0:
            self._free_headers.append(flight.header)
        if flight.cancelled and completion.cause is not None:
            completion = Completion(flight.op.id, Cause.CANCELLED)
        report.completions.append(completion)

    # --- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """After the rails' queue pairs."""
        self._mailbox.close()
        self._flying.clear()
        self._backlog.clear()
        for rail in self._rails:
            rail.queue.drop()


def _wanted(op: Op, *, local: bool) -> Wanted:
    piece = op.piece
    slot = piece.local_slot if local else piece.remote_slot
    generation = piece.local_generation if local else piece.remote_generation
    return Wanted(slot, generation, piece.key, piece.block_length, op.offset, op.length)


def _read_entry(op: Op) -> bytes:
    piece = op.piece
    return wire.READ_ENTRY.pack(
        op.id, piece.remote_slot, wire.FLAG_RANGE, piece.remote_generation, piece.block_length,
        op.offset, op.length, piece.key,
    )  # fmt: skip


def _write_entry(op: Op, found: Found) -> bytes:
    piece = op.piece
    return wire.WRITE_ENTRY.pack(
        op.id, piece.remote_slot, 0, piece.remote_generation, piece.block_length, op.offset,
        op.length, piece.key, found.checksum,
    )  # fmt: skip
