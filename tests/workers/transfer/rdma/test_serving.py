"""What a holder answers to control messages."""

from __future__ import annotations

import mmap

import pytest

from workers.core.errors import ProtocolError
from workers.core.transfer_handshake import SlabFacts
from workers.core.transfer_types import Cause
from workers.pool.arena import MAGIC, Slab, checksum_of
from workers.transfer import tcp_wire as wire
from workers.transfer.base import SlotMemory
from workers.transfer.push import ReservedSlots
from workers.transfer.rdma import control
from workers.transfer.rdma.flights import SLOT_HEADER
from workers.transfer.rdma.serving import Answers

SLOT, BLOCK = 8192, 8000
KEY = b"k" * 16
DATA = bytes(range(250)) * 32


class Holder:
    def __init__(self, *, remote_write: bool = True) -> None:
        self.landed: list[tuple[int, int, int]] = []
        self.push = ReservedSlots(lambda *landed: self.landed.append(landed))
        slab = Slab(mmap.mmap(-1, 8 * SLOT), SLOT, 64)
        self.memory = SlotMemory(slab, SlabFacts(SLOT, 64, 8))
        self.answers = Answers(self.memory, self.push, remote_write=remote_write)

    def ask(self, kind: int, *entries: bytes) -> list[wire.Answer]:
        kind_back, count, body = control.unpack(self.answers.answer(control.pack(kind, entries)))
        assert (kind_back, count) == (kind, len(entries))
        return wire.unpack_answers(body)

    def sum(self, slot: int, offset: int, length: int, generation: int = 1) -> wire.Answer:
        entry = wire.READ_ENTRY.pack(
            5, slot, wire.FLAG_RANGE, generation, BLOCK, offset, length, KEY
        )
        return self.ask(control.SUM, entry)[0]

    def claim(self, op_id: int, slot: int, length: int = BLOCK) -> Cause | None:
        entry = wire.WRITE_ENTRY.pack(op_id, slot, 0, 3, length, 0, length, KEY, checksum_of(DATA))
        return self.ask(control.CLAIM, entry)[0].cause

    def settle(self, kind: int, op_id: int) -> Cause | None:
        return self.ask(kind, control.OP_ID.pack(op_id))[0].cause


def test_headers_are_read_as_slabs_write_them() -> None:
    holder = Holder()
    checksum = holder.memory.slab.write_block(2, 7, KEY, DATA)
    raw = bytes(holder.memory.slab._view)
    assert SLOT_HEADER.unpack_from(raw, 2 * SLOT) == (MAGIC, 7, BLOCK, checksum, KEY)


class TestSums:
    def test_of_a_range(self) -> None:
        holder = Holder()
        checksum = holder.memory.slab.write_block(2, 1, KEY, DATA)
        answer = holder.sum(2, 100, 200)
        assert (answer.cause, answer.checksum) == (None, checksum)
        assert answer.range_checksum == checksum_of(DATA[100:300])

    def test_of_what_is_not_there(self) -> None:
        holder = Holder()
        holder.memory.slab.write_block(2, 1, KEY, DATA)
        assert holder.sum(2, 0, 10, generation=2).cause is Cause.STALE
        assert holder.sum(3, 0, 10).cause is Cause.STALE
        assert holder.sum(9, 0, 10).cause is Cause.BOUNDS

    def test_of_a_block_that_rotted_elsewhere(self) -> None:
        holder = Holder()
        holder.memory.slab.write_block(2, 1, KEY, DATA)
        holder.memory.slab.payload(2)[7000] ^= 1
        assert holder.sum(2, 0, 10).cause is Cause.CORRUPT


class TestPushes:
    def test_lands(self) -> None:
        holder = Holder()
        holder.push.reserve(4, 3, KEY, BLOCK)
        assert holder.claim(1, 4) is None
        holder.memory.range(4, 0, BLOCK)[:] = DATA
        assert holder.settle(control.COMMIT, 1) is None
        assert holder.landed == [(4, 3, checksum_of(DATA))]
        assert holder.memory.slab.read_block(4, 3, KEY) == DATA

    def test_claims_that_are_refused(self) -> None:
        holder = Holder()
        holder.push.reserve(4, 3, KEY, BLOCK - 1)
        assert holder.claim(1, 4) is Cause.REFUSED
        assert holder.claim(2, 5) is Cause.REFUSED
        assert holder.claim(3, 99) is Cause.BOUNDS
        closed = Holder(remote_write=False)
        closed.push.reserve(4, 3, KEY, BLOCK)
        assert closed.claim(1, 4) is Cause.REFUSED

    def test_damage_and_abandoned_slots_come_back(self) -> None:
        holder = Holder()
        for slot in (4, 5, 6):
            holder.push.reserve(slot, 3, KEY, BLOCK)
            assert holder.claim(slot, slot) is None
            assert not holder.push.withdraw(slot)
        assert holder.settle(control.COMMIT, 4) is Cause.CORRUPT
        holder.settle(control.ABANDON, 5)
        holder.answers.end()
        assert all(holder.push.withdraw(slot) for slot in (4, 5, 6))
        assert holder.landed == []
        assert holder.memory.slab.read_header(4) is None


@pytest.mark.parametrize(
    "message",
    [b"", b"x" * 7, control.HEAD.pack(b"NOPE", 1, 1), control.HEAD.pack(control.MAGIC, 9, 1),
     control.HEAD.pack(control.MAGIC, 1, 0), control.HEAD.pack(control.MAGIC, 1, 60000),
     control.pack(control.SUM, [b"short"]), control.pack(control.COMMIT, [control.OP_ID.pack(77)])],
)  # fmt: skip
def test_what_is_no_message_ends_the_connection(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        Holder().answers.answer(message)
