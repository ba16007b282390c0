"""Blocks written into slots that the other node has reserved."""

from __future__ import annotations

import time

from rdma_nodes import KIB, Driver, Node, Nodes, key_of, op_of

from workers.core.transfer_types import Cause, Direction, Op
from workers.transfer.push import ReservedSlots

BLOCK = 64 * KIB


def push(slot: int, local: int, length: int = BLOCK) -> Op:
    return op_of(slot, length, local=local, direction=Direction.PUSH, key=key_of(local))


def world(nodes: Nodes) -> tuple[Node, Node, ReservedSlots, list[int]]:
    landed: list[int] = []
    reserved = ReservedSlots(lambda slot, generation, checksum: landed.append(slot))
    source = nodes.make("prefill")
    target = nodes.make("decode", serve=True, push=reserved)
    return source, target, reserved, landed


def test_blocks_land_whole(nodes: Nodes) -> None:
    source, target, reserved, landed = world(nodes)
    data = source.fill(range(64), BLOCK)
    for slot in range(64):
        reserved.reserve(63 - slot, 1, key_of(slot), BLOCK)
    drive = Driver(source.connect(target)).open()
    ended = drive.move([push(63 - slot, slot) for slot in range(64)])
    assert [completion.cause for completion in ended.values()] == [None] * 64
    assert sorted(landed) == list(range(64))
    for slot in range(64):
        assert target.memory.slab.read_block(63 - slot, 1, key_of(slot)) == data[slot]
    assert target.server is not None
    assert target.server.taken_bytes == 64 * BLOCK


def test_only_reserved_slots_are_written(nodes: Nodes) -> None:
    source, target, reserved, landed = world(nodes)
    source.fill(range(4), BLOCK)
    held = target.fill([7], BLOCK)
    reserved.reserve(3, 1, key_of(3), BLOCK)
    drive = Driver(source.connect(target)).open()
    ended = drive.move([push(7, 0), push(3, 1), push(3, 3), push(9, 60)])
    causes = [completion.cause for completion in ended.values()]
    assert causes == [Cause.REFUSED, Cause.REFUSED, None, Cause.STALE]
    assert target.memory.slab.read_block(7, 1, key_of(7)) == held[7]
    assert landed == [3]
    assert drive.down is None


def test_a_source_that_does_not_match_its_header_is_not_declared_whole(nodes: Nodes) -> None:
    source, target, reserved, landed = world(nodes)
    source.fill([0], BLOCK)
    source.memory.range(0, 5, 1)[0] ^= 255
    reserved.reserve(0, 1, key_of(0), BLOCK)
    (ended,) = Driver(source.connect(target)).open().move([push(0, 0)]).values()
    assert ended.cause is Cause.CORRUPT
    assert target.memory.slab.read_header(0) is None
    assert landed == []
    assert reserved.withdraw(0), "the slot may be used again"


def test_a_node_that_takes_no_pushes_refuses(pair: tuple[Node, Node]) -> None:
    source, target = pair
    source.fill([0], BLOCK)
    (ended,) = Driver(source.connect(target)).open().move([push(0, 0)]).values()
    assert ended.cause is Cause.REFUSED


def test_a_claimed_slot_comes_back_when_the_writer_leaves(nodes: Nodes) -> None:
    source, target, reserved, landed = world(nodes)
    source.fill(range(32), BLOCK)
    for slot in range(32):
        reserved.reserve(slot, 1, key_of(slot), BLOCK)
    drive = Driver(source.connect(target)).open()
    drive.endpoint.post([push(slot, slot) for slot in range(32)])
    time.sleep(0.05)  # claims are answered; nothing is written before the next poll
    drive.endpoint.close()
    waiting = set(range(32))
    deadline = time.monotonic() + 10
    while waiting and time.monotonic() < deadline:
        waiting = {slot for slot in waiting if not reserved.withdraw(slot)}
        time.sleep(0.01)
    assert not waiting
    assert landed == []
    assert all(target.memory.slab.read_header(slot) is None for slot in range(32))
