"""One-sided reads of a peer's slab."""

from __future__ import annotations

import pytest
from rdma_nodes import KIB, MIB, Driver, Node, Nodes, key_of, op_of

from workers.core.rdma_choice import QueueWish
from workers.core.transfer_types import Cause
from workers.transfer.rdma.settings import RdmaSettings

BLOCK = 64 * KIB


def test_blocks_arrive_verified(pair: tuple[Node, Node]) -> None:
    puller, holder = pair
    data = holder.fill(range(64), BLOCK)
    drive = Driver(puller.connect(holder)).open()
    ended = drive.move([op_of(slot, BLOCK) for slot in range(64)])
    assert [completion.cause for completion in ended.values()] == [None] * 64
    assert drive.moved_bytes == 64 * BLOCK
    for slot, block in data.items():
        assert puller.memory.range(slot, 0, BLOCK) == block
        assert puller.memory.slab.read_header(slot) is None, "headers are the engine's to write"


@pytest.mark.timeout(300)
def test_ten_thousand_blocks(nodes: Nodes) -> None:
    length = 16 * KIB  # four packets each
    puller, holder = nodes.pair(num_slots=250, payload=length)
    drive = Driver(puller.connect(holder)).open()
    for generation in range(1, 41):
        data = holder.fill(range(250), length, generation)
        ops = [
            op_of(slot, length, local=(slot * 7 + generation) % 250, generation=generation)
            for slot in range(250)
        ]
        ended = drive.move(ops, seconds=120)
        assert all(completion.cause is None for completion in ended.values())
        for op in ops:
            slot = op.piece.local_slot
            assert puller.memory.range(slot, 0, length) == data[op.piece.remote_slot]
    assert len(drive.completions) == 10_000
    assert drive.endpoint.rails[0].moved_bytes == 10_000 * length  # type: ignore[attr-defined]


def test_large_blocks_in_segments(nodes: Nodes) -> None:
    puller, holder = nodes.pair(num_slots=2, payload=16 * MIB)
    data = holder.fill([0, 1], 16 * MIB - 8)
    drive = Driver(puller.connect(holder)).open()
    ended = drive.move([op_of(slot, 16 * MIB - 8, local=1 - slot) for slot in (0, 1)])
    assert [completion.cause for completion in ended.values()] == [None, None]
    for slot in (0, 1):
        assert puller.memory.range(1 - slot, 0, 16 * MIB - 8) == data[slot]


def test_c13_a_shallow_queue_is_posted_to_in_windows(nodes: Nodes) -> None:  # C13, C14
    wish = QueueWish(send_requests=16, receive_requests=64)
    settings = RdmaSettings(devices=("rxe0",), queues=wish)
    puller = nodes.make("puller", 256, 4 * KIB, settings=settings)
    holder = nodes.make("holder", 256, 4 * KIB, serve=True)
    holder.fill(range(256), 4 * KIB)
    drive = Driver(puller.connect(holder)).open()
    assert drive.depth == 8
    ended = drive.move([op_of(i % 256, 4 * KIB, local=i * 3 % 256) for i in range(2000)])
    assert len(ended) == 2000
    assert all(completion.cause is None for completion in ended.values())
    (rail,) = drive.endpoint.rails  # type: ignore[attr-defined]
    assert (rail.queue.slots, rail.queue.outstanding) == (16, 0)


def test_ranges_are_verified_by_the_source(pair: tuple[Node, Node]) -> None:
    puller, holder = pair
    data = holder.fill(range(8), BLOCK)
    puller.memory.range(0, 0, BLOCK)[:] = b"\xee" * BLOCK
    drive = Driver(puller.connect(holder)).open()
    ranges = [(slot, slot * 100, 5000 + slot) for slot in range(8)]
    ended = drive.move([op_of(slot, BLOCK, offset=at, size=size) for slot, at, size in ranges])
    assert [completion.cause for completion in ended.values()] == [None] * 8
    for slot, at, size in ranges:
        assert puller.memory.range(slot, at, size) == data[slot][at : at + size]
    assert puller.memory.range(0, 5000, BLOCK - 5000) == b"\xee" * (BLOCK - 5000)
    header = holder.memory.slab.read_header(3)
    assert header is not None
    assert [c.checksum for c in ended.values()][3] == header.checksum


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "range"])
def test_what_is_not_there_is_stale(pair: tuple[Node, Node], whole: bool) -> None:
    puller, holder = pair
    holder.fill(range(2), BLOCK)
    size = -1 if whole else 100
    drive = Driver(puller.connect(holder)).open()
    ended = drive.move(
        [
            op_of(0, BLOCK, generation=2, size=size),  # rewritten since
            op_of(1, BLOCK, key=key_of(9), size=size),  # another block
            op_of(5, BLOCK, size=size),  # never written
            op_of(0, BLOCK - 1, local=3, size=size),  # of another length
            op_of(0, BLOCK, local=4, size=size),
        ]
    )
    causes = [completion.cause for completion in ended.values()]
    assert causes == [Cause.STALE, Cause.STALE, Cause.STALE, Cause.BOUNDS, None]
    assert drive.down is None, "an answer, not a failure of the path"


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "range"])
def test_damage_is_found(pair: tuple[Node, Node], whole: bool) -> None:
    puller, holder = pair
    holder.fill([0], BLOCK)
    holder.memory.range(0, 60_000, 1)[0] ^= 1
    drive = Driver(puller.connect(holder)).open()
    (ended,) = drive.move([op_of(0, BLOCK, size=-1 if whole else 100)]).values()
    assert ended.cause is Cause.CORRUPT


def test_beyond_either_slab(pair: tuple[Node, Node]) -> None:
    puller, holder = pair
    holder.fill([0], BLOCK)
    drive = Driver(puller.connect(holder)).open()
    ended = drive.move(
        [op_of(64, BLOCK, local=0), op_of(0, BLOCK, local=64), op_of(0, 2 * BLOCK), op_of(0, BLOCK)]
    )
    causes = [completion.cause for completion in ended.values()]
    assert causes == [Cause.BOUNDS, Cause.BOUNDS, Cause.BOUNDS, None]
    assert drive.down is None


def test_only_the_range_is_written(pair: tuple[Node, Node]) -> None:
    puller, holder = pair
    holder.fill(range(64), BLOCK)
    slab = puller.memory.slab
    for slot in range(64):
        slab.payload(slot)[:] = b"\xaa" * (slab.slot_bytes - slab.header_bytes)
    Driver(puller.connect(holder)).open().move(
        [op_of(10, BLOCK), op_of(20, BLOCK, offset=8, size=8)]
    )
    full = slab.slot_bytes - slab.header_bytes
    for slot in (9, 11, 19, 21):
        assert slab.payload(slot) == b"\xaa" * full
    assert slab.payload(10)[BLOCK:] == b"\xaa" * (full - BLOCK)
    assert slab.payload(20)[:8] == b"\xaa" * 8
    assert slab.payload(20)[16:] == b"\xaa" * (full - 16)
