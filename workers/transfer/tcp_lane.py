"""One connection of an endpoint: batches out, replies in, bytes straight into slots.

A lane never waits. Replies come in the order of its batches, so it always knows what the next bytes
are, and hands the kernel a list of slots to fill: many small blocks cost one call.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Final

import xxhash

from workers.core.errors import ProtocolError
from workers.core.transfer_handshake import MAX_HANDSHAKE_BYTES, Initiator
from workers.core.transfer_types import Cause, Completion, Direction, Op
from workers.core.transfer_verify import Wanted, in_bounds, judge_source
from workers.pool.arena import checksum_of
from workers.transfer import tcp_wire as wire
from workers.transfer.base import Report, SlotMemory
from workers.transfer.tcp_stream import Outbox, Stream

CALL_BYTES: Final = 1 << 20
"""One call fills no more, so that what it brought is still in the processor's cache when hashed."""
CALL_BUFFERS: Final = 64
_STREAMED_BYTES: Final = 1 << 20  # longer ops are hashed as they come
_SCRATCH_BYTES: Final = 256 * 1024


class _Head:
    """Head and entries of the next reply."""

    __slots__ = ("batch", "view", "whole")

    def __init__(self, batch: list[Op]) -> None:
        self.batch = batch
        self.whole = memoryview(bytearray(wire.HEAD.size + len(batch) * wire.REPLY_ENTRY.size))
        self.view = self.whole

    def advance(self, count: int) -> int:
        self.view = self.view[count:]
        return len(self.view)


class _Payload:
    """Bytes of one op on their way into its slot."""

    __slots__ = ("answer", "hasher", "op", "seconds", "view", "whole")

    def __init__(self, op: Op, answer: wire.Answer, view: memoryview) -> None:
        self.op = op
        self.answer = answer
        self.whole = self.view = view
        self.hasher = xxhash.xxh3_64() if len(view) > _STREAMED_BYTES else None
        self.seconds = 0.0

    def advance(self, count: int) -> int:
        if self.hasher is not None:
            started = perf_counter()
            self.hasher.update(self.view[:count])
            self.seconds += perf_counter() - started
        self.view = self.view[count:]
        return len(self.view)

    def completion(self) -> Completion:
        op, answer = self.op, self.answer
        started = perf_counter()
        digest = checksum_of(self.whole) if self.hasher is None else self.hasher.intdigest()
        seconds = self.seconds + perf_counter() - started
        wanted = answer.checksum if op.whole else answer.range_checksum
        cause = None if digest == wanted else Cause.CORRUPT
        return Completion(op.id, cause, answer.checksum, seconds)


class _Discard:
    """Bytes that nobody wants any more."""

    __slots__ = ("left", "view")

    def __init__(self, left: int) -> None:
        self.left = left
        self.view = memoryview(bytearray(min(left, _SCRATCH_BYTES)))

    def advance(self, count: int) -> int:
        self.left -= count
        self.view = self.view[: self.left]
        return self.left


_Incoming = _Head | _Payload | _Discard


class Lane:
    """See the module. `receive` and `flush` raise OSError, EOFError, ProtocolError, RefusedError:
    the connection is of no use any more."""

    def __init__(self, stream: Stream, memory: SlotMemory, initiator: Initiator) -> None:
        self.stream = stream
        self.initiator = initiator
        self.open = False
        self.load_bytes = 0  # asked for and not here yet
        self._memory = memory
        self._secure = False
        self._outbox = Outbox()
        self._waiting: deque[list[Op]] = deque()
        self._incoming: deque[_Incoming] = deque()
        self._head_expected = False
        self._cancelled: set[int] = set()
        self._frame = bytearray()

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox) or self.stream.wants_write()

    # --- out --------------------------------------------------------------------------------

    def start(self) -> None:
        """Connected: say hello."""
        self._say(self.initiator.start())

    def post(self, ops: Sequence[Op], report: Report) -> None:
        """Ask for these, in one batch of one direction. What cannot be asked ends in `report`."""
        kind = wire.READ if ops[0].direction is Direction.PULL else wire.WRITE
        batch: list[Op] = []
        entries = bytearray()
        payloads: list[memoryview] = []
        for op in ops:
            cause = self._pack_read(op, entries) if kind == wire.READ else (
                self._pack_write(op, entries, payloads)
            )  # fmt: skip
            if cause is not None:
                report.completions.append(Completion(op.id, cause))
                continue
            batch.append(op)
            self.load_bytes += op.length
        if not batch:
            return
        size = sum(map(len, payloads))
        self._outbox.add(memoryview(wire.pack_head(kind, len(batch), size) + entries))
        for view in payloads:
            self._outbox.add(view)
        self._waiting.append(batch)
        self._expect_head()

    def flush(self) -> int:
        """Send what the kernel takes; bytes."""
        if not self._secure or not self._outbox:
            return 0
        return self._outbox.flush(self.stream)

    def cancel(self, op_ids: set[int], report: Report) -> None:
        """Their bytes, if they still come, go nowhere."""
        for position, item in enumerate(self._incoming):
            if isinstance(item, _Payload) and item.op.id in op_ids:
                self._incoming[position] = _Discard(len(item.view))
                self._end(item.op, Completion(item.op.id, Cause.CANCELLED), report)
        heads = [item.batch for item in self._incoming if isinstance(item, _Head)]
        for batch in [*heads, *self._waiting]:
            for op in batch:
                if op.id in op_ids and op.id not in self._cancelled:
                    self._cancelled.add(op.id)
                    self._end(op, Completion(op.id, Cause.CANCELLED), report)

    # --- in ---------------------------------------------------------------------------------

    def receive(self, report: Report, limit: int) -> None:
        """Take what is there, up to about `limit` bytes."""
        if not self._secure:
            self._secure = self.stream.secure()
            if not self._secure:
                return
            self.flush()
        moved = 0
        while moved < limit:
            was_open = self.open
            buffers = self._buffers() if was_open else []
            try:
                count = self.stream.recv(buffers) if was_open else self._listen()
            except BlockingIOError:
                break
            if not count:
                raise EOFError("the peer closed the connection")
            if was_open:
                if not self._incoming:
                    raise ProtocolError("bytes that nobody asked for")
                moved += count
                self._consume(count, report)
                if count < sum(map(len, buffers)) and self.stream.short_is_all:
                    break
        report.moved_bytes += moved

    def _buffers(self) -> list[memoryview]:
        views: list[memoryview] = []
        room = CALL_BYTES
        for item in self._incoming:
            view = item.view
            if len(view) >= room:
                views.append(view[:room])
                break
            views.append(view)
            room -= len(view)
            if len(views) == CALL_BUFFERS or isinstance(item, _Discard):
                break  # a discard's buffer is filled more than once
        return views or [memoryview(bytearray(1))]  # nothing is due: only an end may come

    def _consume(self, count: int, report: Report) -> None:
        while count:
            item = self._incoming[0]
            take = min(count, len(item.view))
            count -= take
            if not item.advance(take):
                self._incoming.popleft()
                self._finish(item, report)

    def _finish(self, item: _Incoming, report: Report) -> None:
        if isinstance(item, _Payload):
            self._end(item.op, item.completion(), report)
        elif isinstance(item, _Head):
            self._head_expected = False
            self._read_head(item, report)
            self._expect_head()

    def _read_head(self, head: _Head, report: Report) -> None:
        kind, count, _ = wire.unpack_head(head.whole)
        if count != len(head.batch):
            raise ProtocolError(f"a reply of {count} entries to a batch of {len(head.batch)}")
        answers = wire.unpack_answers(head.whole[wire.HEAD.size :])
        for op, answer in zip(head.batch, answers, strict=True):
            if answer.op_id != op.id:
                raise ProtocolError(f"a reply to op {answer.op_id} where {op.id} was due")
            self._read_answer(kind, op, answer, report)

    def _read_answer(self, kind: int, op: Op, answer: wire.Answer, report: Report) -> None:
        if op.id in self._cancelled:
            self._cancelled.discard(op.id)
            if answer.length:
                self._incoming.append(_Discard(answer.length))
        elif answer.cause is not None or kind == wire.WRITE:
            if answer.length:
                raise ProtocolError(f"op {op.id}: payload where none belongs")
            self._end(op, Completion(op.id, answer.cause, answer.checksum), report)
        elif answer.length != op.length:
            raise ProtocolError(f"op {op.id}: {answer.length} bytes, asked for were {op.length}")
        else:
            view = self._memory.range(op.piece.local_slot, op.offset, op.length)
            self._incoming.append(_Payload(op, answer, view))

    def _end(self, op: Op, completion: Completion, report: Report) -> None:
        self.load_bytes -= op.length
        report.completions.append(completion)

    def _expect_head(self) -> None:
        if not self._head_expected and self._waiting:
            self._head_expected = True
            self._incoming.append(_Head(self._waiting.popleft()))

    # --- packing ----------------------------------------------------------------------------

    def _pack_read(self, op: Op, entries: bytearray) -> Cause | None:
        piece, memory = op.piece, self._memory
        end = op.offset + op.length
        if not (0 <= piece.local_slot < memory.num_slots and end <= memory.payload_bytes):
            return Cause.BOUNDS
        entries += wire.READ_ENTRY.pack(
            op.id, piece.remote_slot, 0 if op.whole else wire.FLAG_RANGE, piece.remote_generation,
            piece.block_length, op.offset, op.length, piece.key,
        )  # fmt: skip
        return None

    def _pack_write(self, op: Op, entries: bytearray, payloads: list[memoryview]) -> Cause | None:
        piece, memory = op.piece, self._memory
        local = Wanted(
            piece.local_slot, piece.local_generation, piece.key,
            piece.block_length, op.offset, op.length,
        )  # fmt: skip
        if not in_bounds(local, memory.num_slots, memory.payload_bytes):
            return Cause.BOUNDS
        found = memory.found(piece.local_slot)
        cause = judge_source(local, found)
        if cause is not None or found is None:
            return cause
        entries += wire.WRITE_ENTRY.pack(
            op.id, piece.remote_slot, 0, piece.remote_generation, piece.block_length, op.offset,
            op.length, piece.key, found.checksum,
        )  # fmt: skip
        payloads.append(memory.range(piece.local_slot, op.offset, op.length))
        return None

    # --- handshake --------------------------------------------------------------------------

    def _listen(self) -> int:
        """Bytes of the handshake. One frame at a time: what follows it is not ours to buffer."""
        size = wire.FRAME.size
        due = size - len(self._frame)
        if due <= 0:
            length: int = wire.FRAME.unpack_from(self._frame)[0]
            if length > MAX_HANDSHAKE_BYTES:
                raise ProtocolError(f"handshake of {length} bytes")
            due = size + length - len(self._frame)
        buffer = bytearray(due)
        count = self.stream.recv([memoryview(buffer)])
        self._frame += buffer[:count]
        self._try_document()
        return count

    def _try_document(self) -> None:
        size = wire.FRAME.size
        if len(self._frame) <= size:
            return
        if len(self._frame) == size + wire.FRAME.unpack_from(self._frame)[0]:
            document = bytes(self._frame[size:])
            self._frame.clear()
            reply = self.initiator.receive(document)
            self.open = self.initiator.accepted is not None
            if reply is not None:
                self._say(reply)
                self.flush()

    def _say(self, document: bytes) -> None:
        self._outbox.add(memoryview(wire.FRAME.pack(len(document)) + document))


def tls_name(context: ssl.SSLContext | None, host: str) -> str | None:
    """What the peer's certificate must be for, where names are checked."""
    return host if context is not None and context.check_hostname else None
