"""Ops in flight: cut into segments, spread over rails, verified when all of them are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from time import perf_counter
from typing import Final

from workers.core.errors import ProtocolError
from workers.core.rdma_choice import is_far, pick_rail
from workers.core.transfer_types import Cause, Completion, Direction, Op
from workers.core.transfer_verify import Found, Wanted, judge_source
from workers.pool.arena import MAGIC, checksum_of
from workers.transfer import tcp_wire as wire
from workers.transfer.base import Report, SlotMemory
from workers.transfer.rdma import control
from workers.transfer.rdma.control import Mailbox, Sent
from workers.transfer.rdma.landing import Landing
from workers.transfer.rdma.port import Scratch
from workers.transfer.rdma.rail import Marker, Rail, Segment, Token
from workers.transfer.rdma.send_queue import CHAIN
from workers.transfer.rdma.setup import PeerMemory
from workers.transfer.rdma.status import Meaning

SLOT_HEADER: Final = Struct("<8sQQQ16s")
"""A slot's header as `Slab` writes it: magic, generation, length, checksum, key."""
_MAGIC: Final = Struct("<8s")
_NO_MAGIC: Final = bytes(8)
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
    landing: Landing | None = None  # of a read in several segments
    start: int = 0  # where its first byte goes, as in `Segment.local`


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
        slot_nodes: Sequence[int] = (),
    ) -> None:
        """`slot_nodes`: the memory node of each slot, where rails differ in theirs."""
        self._memory = memory
        self._slot_nodes = slot_nodes
        self._rails = rails
        self._peer = peer
        self._segment_bytes = segment_bytes
        self._flying: dict[int, Flight] = {}
        self._backlog: deque[Token] = deque()
        self._free_headers = deque(range(HEADERS))
        self._header_bytes = memory.slab.header_bytes
        self._header_view = scratch.view
        self._headers_address = scratch.address
        facts = peer.facts
        first = memory.payload_address(0)
        self._payload_start = first - memory.region.address
        self._payload_step = memory.payload_address(1) - first
        self._remote_base = peer.base + facts.header_bytes
        self._remote_payload = facts.slot_bytes - facts.header_bytes
        smallest = min(rail.queue.slots for rail in rails)
        self._max_segments = smallest // 2
        lkey = scratch.register(rails[0].port)
        offset = HEADERS * memory.slab.header_bytes
        self._mailbox = Mailbox(rails[0].pair, rails[0].queue, scratch, lkey, offset)
        self._mailbox.post_receives(rails[0].port.verbs.wr)
        self._asks: dict[int, list[bytes]] = {kind: [] for kind in control.KINDS}
        self._unanswered = 0
        self.failure: tuple[Rail, Meaning] | None = None
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
            self._flush_rail(rail)

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
        piece, memory = op.piece, self._memory
        if not (
            0 <= piece.local_slot < memory.num_slots
            and 0 <= piece.remote_slot < self._peer.facts.num_slots
            and op.offset >= 0
            and op.length > 0
            and op.offset + op.length <= piece.block_length
            and piece.block_length <= min(memory.payload_bytes, self._remote_payload)
        ):
            return Cause.BOUNDS
        if op.direction is Direction.PULL:
            return None
        if not self._peer.remote_write:
            return Cause.REFUSED
        return judge_source(_wanted(op, local=True), memory.found(piece.local_slot))

    def _start_pull(self, op: Op) -> bool:
        whole = op.length == op.piece.block_length
        if whole and not self._free_headers:
            return False
        if not whole and not self._may_ask():
            return False
        segments = self._cut(op)
        if self._room() < len(segments):
            return False
        flight = Flight(op, len(segments), start=segments[0].local)
        if len(segments) > 1:
            flight.landing = Landing(self._memory.range(op.piece.local_slot, op.offset, op.length))
        if whole:
            flight.header = number = self._free_headers.popleft()
            at, first = number * self._header_bytes, segments[0]
            _MAGIC.pack_into(self._header_view, at, _NO_MAGIC)
            segments[0] = Segment(
                first.op_id, first.local, first.remote, first.length, False,
                self._headers_address + at, self._header_bytes,
            )  # fmt: skip
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
        piece, length = op.piece, op.length
        local = self._payload_start + piece.local_slot * self._payload_step + op.offset
        remote = self._remote_base + piece.remote_slot * self._peer.facts.slot_bytes + op.offset
        write = op.direction is Direction.PUSH
        size = self._segment_bytes
        if length <= size:
            return [Segment(op.id, local, remote, length, write)]
        size = max(size, -(-length // self._max_segments))
        return [
            Segment(op.id, local + at, remote + at, min(size, length - at), write)
            for at in range(0, length, size)
        ]

    def _room(self) -> int:
        """A slot of each rail is left for messages."""
        if len(self._rails) == 1:
            return self._rails[0].queue.room - 1
        return sum(max(0, rail.queue.room - 1) for rail in self._rails)

    def _drain(self) -> None:
        """Stage what waits, each on the rail that will be free first, and let the device begin
        with a chain as soon as it is long enough."""
        backlog = self._backlog
        while backlog:
            node = self._node_of(backlog[0])
            rail = self._pick(node)
            if rail is None:
                return
            token = backlog.popleft()
            if type(token) is Segment:
                rail.stage(token, far=node >= 0 and is_far(node, rail.port.port.numa_node))
                if rail.queue.staged >= CHAIN and not self._flush_rail(rail):
                    return

    def _node_of(self, token: Token) -> int:
        """The memory node of the slot that it is about; -1: it makes no difference."""
        if not self._slot_nodes or type(token) is not Segment:
            return -1
        return self._slot_nodes[token.local // self._memory.slab.slot_bytes]

    def _pick(self, node: int) -> Rail | None:
        rails = self._rails
        if len(rails) == 1:
            return rails[0] if rails[0].queue.room > 1 else None
        room = [max(0, rail.queue.room - 1) for rail in rails]
        load = [rail.queue.outstanding_bytes for rail in rails]
        ports = [rail.port.port for rail in rails]
        far = [is_far(node, port.numa_node) for port in ports] if node >= 0 else []
        index = pick_rail(load, [port.gbps for port in ports], room, far)
        return rails[index] if index >= 0 else None

    def _flush_rail(self, rail: Rail) -> bool:
        """What the device did not take is put before all that waits, in its order. False: some."""
        left = rail.flush()
        for token in reversed(left):
            if isinstance(token, Segment):
                self._backlog.appendleft(token)
        for token in left:
            if isinstance(token, Sent):
                self._mailbox.restage(token)
        return not left

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
                self.failure = rail, found.failure

    def _done(self, token: Token, report: Report) -> None:
        match token:
            case Segment():
                report.moved_bytes += token.length
                flight = self._flying.get(token.op_id)
                assert flight is not None, "a segment without its op"
                if flight.landing is not None or (self._memory.copies and not token.write):
                    self._landed(flight, token)
                self._one_less(flight, report)
            case Sent():
                self._mailbox.sent(token)
            case Marker():
                pass

    def _landed(self, flight: Flight, segment: Segment) -> None:
        piece, start = flight.op.piece, segment.local - flight.start
        self._memory.arrived(piece.local_slot, flight.op.offset + start, segment.length)
        if flight.landing is not None:
            flight.landing.landed(start, segment.length)

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
            piece, at = op.piece, flight.header * self._header_bytes
            magic, generation, length, checksum, key = SLOT_HEADER.unpack_from(
                self._header_view, at
            )
            if magic != MAGIC or (generation, key) != (piece.remote_generation, piece.key):
                return Completion(op.id, Cause.STALE)
            if length != piece.block_length:
                return Completion(op.id, Cause.BOUNDS)
            expected = checksum
        digest, seconds = self._digest(flight)
        if digest != expected:
            return Completion(op.id, Cause.CORRUPT, checksum, seconds)
        if self._memory.copies:
            self._memory.verified(op.piece.local_slot, op.offset, op.length)
        return Completion(op.id, None, checksum, seconds)

    def _digest(self, flight: Flight) -> tuple[int, float]:
        """Of the bytes as they lie here, and how long it took."""
        if flight.landing is not None:
            return flight.landing.digest(), flight.landing.seconds
        op, started = flight.op, perf_counter()
        digest = checksum_of(self._memory.range(op.piece.local_slot, op.offset, op.length))
        return digest, perf_counter() - started

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
