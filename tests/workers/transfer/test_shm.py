"""Shared memory: copies beside the engine's thread, and how they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from workers.core.transfer_types import Cause
from workers.pool.arena import checksum_of
from workers.transfer import copiers, shm
from workers.transfer.base import SlotMemory
from workers.transfer.shm import ShmEndpoint, ShmTransport

BLOCK = 256 * 1024 - 64
PIECE = 4096
SECONDS = 20.0
Rig = Any


class Gate(SlotMemory):
    """Memory whose slots are reached only once the gate is opened."""

    def __init__(self, memory: SlotMemory) -> None:
        super().__init__(memory.slab, memory.facts, memory.incarnation)
        self.opened = threading.Event()
        self.reached = threading.Semaphore(0)

    def range(self, slot: int, offset: int, length: int) -> memoryview:
        self.reached.release()
        assert self.opened.wait(SECONDS)
        return super().range(slot, offset, length)


@pytest.fixture
def rig(make_rig: Callable[[str], Rig]) -> Rig:
    return make_rig("shm")


@pytest.fixture
def connect(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[SlotMemory, int], ShmEndpoint]]:
    """An endpoint with so many copiers, which copy everything, in pieces of 4 KiB."""
    monkeypatch.setattr(shm, "SMALL_BYTES", 0)
    monkeypatch.setattr(shm, "_CHUNK_BYTES", PIECE)
    made: list[ShmTransport] = []

    def connect(memory: SlotMemory, num_threads: int) -> ShmEndpoint:
        made.append(ShmTransport(memory, num_threads))
        endpoint = made[-1].connect(rig.serve(), 0)
        rig.endpoints.append(endpoint)
        assert rig.wait(endpoint, lambda seen: seen.opened is not None).down is None
        assert isinstance(endpoint, ShmEndpoint)
        return endpoint

    yield connect
    for transport in made:
        transport.close()


def test_blocks_that_are_copied_side_by_side_are_all_whole(
    rig: Rig, op: Any, connect: Callable[..., ShmEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copiers, "BATCH_BYTES", 1)
    gate = Gate(rig.reader)
    blocks = rig.fill(*range(20))
    endpoint = connect(gate, 4)
    ops = [op(index, index) for index in range(20)]
    assert endpoint.post(ops) == 20
    for _ in range(4):
        assert gate.reached.acquire(timeout=SECONDS), "fewer than four at a time"
    gate.opened.set()
    report = rig.wait(endpoint, lambda seen: len(seen.completions) >= 20)
    assert sorted(one.op_id for one in report.completions) == list(range(20))
    assert {one.cause for one in report.completions} == {None}
    assert all(one.moving_seconds > 0 for one in report.completions)
    assert report.moved_bytes == 20 * BLOCK
    assert {index: rig.local(index) for index in range(20)} == blocks


def test_an_op_that_is_given_up_amid_its_copy_stops_at_the_next_piece(
    rig: Rig, op: Any, connect: Callable[..., ShmEndpoint]
) -> None:
    gate = Gate(rig.reader)
    rig.fill(1, 2)
    endpoint = connect(gate, 1)
    endpoint.post([op(1, 1), op(2, 2)])
    assert gate.reached.acquire(timeout=SECONDS)
    endpoint.cancel([1, 2])
    gate.opened.set()
    report = rig.wait(endpoint, lambda seen: len(seen.completions) >= 2)
    assert {one.op_id: one.cause for one in report.completions} == {
        1: Cause.CANCELLED,
        2: Cause.CANCELLED,
    }
    assert rig.local(1)[PIECE:] == bytes(BLOCK - PIECE)
    assert rig.local(2) == bytes(BLOCK)
    done = rig.finish(endpoint, [op(3, 1)])
    assert done[3].cause is None, "the path works on"


def test_close_waits_for_a_copy_under_way_and_nothing_is_written_after_it(
    rig: Rig, op: Any, connect: Callable[..., ShmEndpoint]
) -> None:
    gate = Gate(rig.reader)
    rig.fill(1, 2)
    endpoint = connect(gate, 1)
    endpoint.post([op(1, 1), op(2, 2)])
    assert gate.reached.acquire(timeout=SECONDS)
    closing = threading.Thread(target=endpoint.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "a copier still holds a slot"
    gate.opened.set()
    closing.join(SECONDS)
    assert not closing.is_alive()
    assert rig.local(1)[PIECE:] == bytes(BLOCK - PIECE)
    assert rig.local(2) == bytes(BLOCK)
    assert endpoint.post([op(3, 1)]) == 0


def test_a_slab_that_is_gone_takes_the_endpoint_down_while_others_copy(
    rig: Rig, op: Any, connect: Callable[..., ShmEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copiers, "BATCH_BYTES", 1)
    gate = Gate(rig.reader)
    rig.fill(*range(6))
    endpoint = connect(gate, 2)
    endpoint.post([op(index, index) for index in range(6)])
    for _ in range(2):
        assert gate.reached.acquire(timeout=SECONDS)
    (rig.folder / "holder.slab").unlink()
    gate.opened.set()
    report = rig.wait(endpoint, lambda seen: seen.down is not None)
    assert report.down.cause is Cause.INCARNATION
    assert rig.local(5) == bytes(BLOCK)


def test_a_copy_that_fails_takes_the_endpoint_down(
    rig: Rig, op: Any, connect: Callable[..., ShmEndpoint]
) -> None:
    class Broken(SlotMemory):
        def range(self, slot: int, offset: int, length: int) -> memoryview:
            raise RuntimeError("no such memory")

    rig.fill(1)
    endpoint = connect(Broken(rig.reader.slab, rig.reader.facts), 1)
    endpoint.post([op(1, 1)])
    report = rig.wait(endpoint, lambda seen: seen.down is not None)
    assert report.down.cause is Cause.CONNECTION
    assert "no such memory" in report.down.text


def test_a_block_that_comes_in_ranges_is_hashed_whole_once(
    rig: Rig, op: Any, connect: Callable[..., ShmEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def note(payload: memoryview) -> int:
        hashed.append(len(payload))
        return checksum_of(payload)

    monkeypatch.setattr(shm, "checksum_of", note)
    blocks = rig.fill(2)
    ranges = [(start, min(65536, BLOCK - start)) for start in range(0, BLOCK, 65536)]
    ops = [op(n, 2, offset=o, length=length) for n, (o, length) in enumerate(ranges)]
    done = rig.finish(connect(rig.reader, 1), ops)
    assert {one.cause for one in done.values()} == {None}
    assert hashed.count(BLOCK) == 1
    assert rig.local(2) == blocks[2]
    rig.holder.slab.write_block(2, 4, b"x" * 16, blocks[2])
    stale = rig.finish(rig.endpoints[-1], [op(9, 2, offset=0, length=64)])
    assert stale[9].cause is Cause.STALE


def test_what_is_small_is_moved_without_another_thread(rig: Rig, op: Any) -> None:
    blocks = rig.fill(3)
    transport = ShmTransport(rig.reader, 2)
    endpoint = transport.connect(rig.serve(), 0)
    rig.endpoints.append(endpoint)
    assert rig.finish(endpoint, [op(1, 3)])[1].cause is None
    assert rig.local(3) == blocks[3]
    assert not transport.copiers._threads


def test_threads_without_work_end(
    rig: Rig, op: Any, connect: Callable[..., ShmEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copiers, "IDLE_SECONDS", 0.01)
    rig.fill(1, 2)
    endpoint = connect(rig.reader, 2)
    assert rig.finish(endpoint, [op(1, 1), op(2, 2)])[1].cause is None
    deadline = time.monotonic() + SECONDS
    while endpoint._copiers._threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert rig.finish(endpoint, [op(3, 1)])[3].cause is None, "they come back"


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 2), (16, 4), (128, 4)])
def test_a_few_threads_by_the_machines_cores(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copiers.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert copiers.num_copiers() == threads
