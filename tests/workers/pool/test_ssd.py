"""The SSD tier's own threads and file, without a pool."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workers.core.messages import SlotRef
from workers.core.tiers import BlockRecord, Forget, Outcome, ReadIn, WriteOut
from workers.pool import ssd as ssd_module
from workers.pool.arena import Slab, SlabFile
from workers.pool.ssd import SsdSettings, SsdTier
from workers.pool.ssd_file import SsdFile, claims
from workers.pool.tier import TierError

SLOT_BYTES = 16_384
BLOCK_BYTES = 12_345
NUM_SLOTS = 16
CAP = 20 * (SLOT_BYTES + 256)
WAIT = 20.0


class Bench:
    """A tier over a slab; blocks are named by number."""

    def __init__(self, folder: Path, slab: Slab, cap: int = CAP, name: str = "s.slab") -> None:
        self.slab = slab
        self.outcomes: queue.Queue[Outcome] = queue.Queue()
        self.grown: queue.Queue[int] = queue.Queue()
        self.full: queue.Queue[bool] = queue.Queue()
        self.tier = SsdTier(
            SsdSettings(folder, name, cap), slab, BLOCK_BYTES,
            done=self.outcomes.put, grown=self.grown.put, full=self.full.put,
        )  # fmt: skip
        self.opened = self.tier.open()

    def start(self) -> Bench:
        self.tier.start()
        num_slots = self.opened.num_slots
        while num_slots < self.opened.max_slots:
            num_slots = self.grown.get(timeout=WAIT)
        return self

    def record(self, number: int, checksum: int = 0) -> BlockRecord:
        key = number.to_bytes(16, "big")
        return BlockRecord(number, 7, key, b"", bytes(32), "t", BLOCK_BYTES, checksum)

    def data(self, number: int) -> bytes:
        return bytes([number + 1]) * BLOCK_BYTES

    def fill(self, number: int) -> BlockRecord:
        key = number.to_bytes(16, "big")
        checksum = self.slab.write_block(number, 1, key, self.data(number))
        return self.record(number, checksum)

    def write(self, record: BlockRecord) -> Outcome:
        self.tier.submit([WriteOut(record.slot, SlotRef(record.slot, 1), record)])
        return self.outcomes.get(timeout=WAIT)

    def read(self, record: BlockRecord, target: int = 15, urgency: Any = "first_token") -> Outcome:
        self.tier.submit([ReadIn(99, SlotRef(target, 4), record, urgency)])
        return self.outcomes.get(timeout=WAIT)


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Slab]:
    file = SlabFile("s.slab", NUM_SLOTS * SLOT_BYTES, tmp_path)
    with Slab.attach(file.path, SLOT_BYTES) as made:
        yield made
    file.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def bench(folder: Path, slab: Slab) -> Iterator[Bench]:
    made = Bench(folder, slab).start()
    yield made
    made.tier.close()


def path_of(folder: Path) -> Path:
    return folder / "s.slab.ssd"


def test_out_and_in_again(bench: Bench) -> None:
    records = [bench.fill(number) for number in range(4)]
    assert [bench.write(record).problem for record in records] == [""] * 4
    for record in records:
        assert bench.read(record).problem == ""
        assert bench.slab.read_block(15, 4, record.key) == bench.data(record.slot)


def test_a_source_that_changed_is_not_written(bench: Bench) -> None:
    record = bench.fill(0)
    bench.slab.payload(0)[9000] ^= 1
    assert bench.write(record).problem == "source"
    record = bench.fill(0)
    bench.slab.write_block(0, 2, record.key, bench.data(0))
    assert bench.write(record).problem == "source"
    assert bench.read(record).problem == "missing"


def test_b22_each_damage_has_its_name_and_no_bytes(bench: Bench, folder: Path) -> None:
    records = [bench.fill(number) for number in range(4)]
    for record in records:
        bench.write(record)
    file = bench.tier._file
    assert file is not None
    with path_of(folder).open("r+b") as raw:
        raw.seek(file._data_offset(0) + 10_000)
        raw.write(b"\xff")
        raw.flush()
        os.fsync(raw.fileno())
    file.write_record(1, None)
    assert bench.read(records[0]).problem == "checksum"
    assert bench.slab.read_header(15) is None
    assert bench.read(records[1]).problem == "missing"
    file.shrink(3)
    assert bench.read(records[3]).problem == "short"
    assert bench.read(records[2]).problem == ""


def test_contents_are_found_again_unless_forgotten(bench: Bench, folder: Path, slab: Slab) -> None:
    records = [bench.fill(number) for number in range(3)]
    for record in records:
        bench.write(record)
    bench.tier.submit([Forget(1, 7), Forget(2, 6)])
    assert bench.read(records[0]).problem == ""
    for _ in range(200):
        if bench.tier._file is not None and bench.tier._file.read_record(1) is None:
            break
        os.sched_yield()
        bench.read(records[0])
    bench.tier.close()
    again = Bench(folder, slab).start()
    try:
        assert sorted(again.opened.records, key=lambda r: r.slot) == [records[0], records[2]]
        assert again.read(records[2]).problem == ""
    finally:
        again.tier.close()


def test_another_geometry_begins_anew_and_a_smaller_cap_keeps_what_fits(
    bench: Bench, folder: Path, slab: Slab
) -> None:
    records = [bench.fill(number) for number in range(6)]
    for record in records:
        bench.write(record)
    bench.tier.close()
    small = Bench(folder, slab, cap=3 * (SLOT_BYTES + 256))
    assert {r.slot for r in small.opened.records} == {0, 1, 2}
    assert small.opened.max_slots == 3
    small.tier.close()
    file = SsdFile(path_of(folder), SLOT_BYTES, BLOCK_BYTES + 1, CAP)
    assert (list(file.records()), file.num_slots) == ([], 0)
    file.close()


def test_one_file_has_one_agent(bench: Bench, folder: Path, slab: Slab) -> None:
    with pytest.raises(TierError, match="in use by another agent"):
        Bench(folder, slab)
    assert claims(folder) == [(CAP, bench.tier.facts().allocated_bytes)]


def test_b23_a_full_disk_leaves_no_half_block(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = bench.fill(0)
    bench.write(record)
    whole = SsdFile.write_slot

    def half(file: SsdFile, slot: int, page: memoryview, rest: memoryview) -> None:
        os.pwrite(file._fd, page, file._data_offset(slot))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SsdFile, "write_slot", half)
    monkeypatch.setattr(ssd_module, "floor_bytes", lambda _: 1 << 60)
    for _ in range(100):
        outcome = bench.write(record)
        assert outcome.problem == "full"
        assert bench.read(record).problem == "missing"
    assert bench.full.get(timeout=WAIT) is True
    assert {path.name for path in folder.iterdir()} == {"s.slab.ssd", ".perilune-ssd.lock"}
    monkeypatch.setattr(SsdFile, "write_slot", whole)
    monkeypatch.undo()
    while bench.full.get(timeout=WAIT):
        pass
    assert bench.write(record).problem == ""
    assert bench.read(record).problem == ""


def test_several_agents_share_a_small_disk(
    folder: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wants all that is there: each gets the same, and the floor stays free."""
    step = SLOT_BYTES + 256
    total = 100 * step
    monkeypatch.setattr(ssd_module, "GROW_BYTES", step)
    monkeypatch.setattr(ssd_module, "GROW_SECONDS", 0.001)
    monkeypatch.setattr(ssd_module, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(ssd_module, "floor_bytes", lambda _: 10 * step)

    class Facts:
        f_frsize = 1
        f_blocks = total

        @property
        def f_bavail(self) -> int:
            return total - sum(allocated for _, allocated in claims(folder))

    monkeypatch.setattr("workers.pool.ssd.os.statvfs", lambda _: Facts())
    benches = [Bench(folder, slab, total, name) for name in ("a", "b", "c")]
    try:
        for bench in benches:
            bench.tier.start()
        for _ in range(2000):
            if all(bench.tier.facts().state.startswith("full") for bench in benches):
                break
            benches[0].tier._closing.wait(0.01)
        taken = [bench.tier.facts().allocated_bytes for bench in benches]
        assert "Free some space" in benches[0].tier.facts().state
        assert sum(taken) <= 90 * step + 3 * 65_536
        assert max(taken) - min(taken) <= 2 * step + 65_536
    finally:
        for bench in benches:
            bench.tier.close()


def test_urgent_reads_go_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads are held by one write each; then what waits is taken by urgency."""
    records = [bench.fill(number) for number in range(8)]
    for record in records:
        bench.write(record)
    gate = threading.Event()
    plain = SsdFile.write_slot

    def slow(file: SsdFile, slot: int, page: memoryview, rest: memoryview) -> None:
        gate.wait(WAIT)
        plain(file, slot, page, rest)

    monkeypatch.setattr(SsdFile, "write_slot", slow)
    writes = [WriteOut(i, SlotRef(i, 1), records[i]) for i in range(6)]
    bench.tier.submit(writes)
    urgencies: list[Any] = ["batch", "first_token", "batch", "first_token"]
    reads = [ReadIn(100 + i, SlotRef(12 + i, 9), records[6], u) for i, u in enumerate(urgencies)]
    bench.tier.submit(reads)
    order = []
    gate.set()
    for _ in range(10):
        order.append(bench.outcomes.get(timeout=WAIT).job)
    waiting = [job for job in order if job not in (0, 1, 2, 3)]
    assert set(waiting[:2]) <= {101, 103, 100, 102}
    assert waiting.index(4) > waiting.index(101)
    assert waiting.index(5) > waiting.index(103)
