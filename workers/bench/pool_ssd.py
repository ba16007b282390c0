"""The SSD tier beside plain O_DIRECT file I/O on the same disk, in turns."""

from __future__ import annotations

import mmap
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workers.core.blocks import slot_bytes_of
from workers.core.messages import SlotRef
from workers.core.tiers import BlockRecord, DiskJob, Outcome, ReadIn, WriteOut
from workers.pool.arena import Slab, SlabFile
from workers.pool.ssd import NUM_THREADS, SsdSettings, SsdTier

_BLOCK_BYTES = 1 << 20
_NUM_BLOCKS = 96
_ROUNDS = 3
_WAIT_SECONDS = 20.0


def measure_ssd(folder: Path) -> dict[str, float]:
    """`ssd_over_raw` (write and read of the same blocks together), with both parts."""
    slot_bytes = slot_bytes_of(_BLOCK_BYTES)
    file = SlabFile(f"perilune-bench-{os.getpid()}.slab", slot_bytes * _NUM_BLOCKS)
    try:
        with Slab.attach(file.path, slot_bytes) as slab:
            return _measure(folder, slab, slot_bytes)
    finally:
        file.close()


def _measure(folder: Path, slab: Slab, slot_bytes: int) -> dict[str, float]:
    tier = _Tier(folder, slab)
    raw = _RawFile(folder / "raw", slot_bytes)
    seconds: dict[str, list[float]] = {
        "tier_write": [],
        "tier_read": [],
        "raw_write": [],
        "raw_read": [],
    }
    try:
        for _ in range(_ROUNDS):
            seconds["tier_write"].append(_timed(tier.write))
            seconds["raw_write"].append(_timed(raw.write))
            seconds["tier_read"].append(_timed(tier.read))
            seconds["raw_read"].append(_timed(raw.read))
    finally:
        tier.close()
        raw.close()
    best = {name: min(taken) for name, taken in seconds.items()}
    num_bytes = _NUM_BLOCKS * slot_bytes
    return {
        "ssd_over_raw": (best["raw_write"] + best["raw_read"])
        / (best["tier_write"] + best["tier_read"]),
        "ssd_write_over_raw": best["raw_write"] / best["tier_write"],
        "ssd_read_over_raw": best["raw_read"] / best["tier_read"],
        "ssd_write_mb_per_second": num_bytes / best["tier_write"] / 1e6,
        "ssd_read_mb_per_second": num_bytes / best["tier_read"] / 1e6,
    }


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class _Tier:
    """Writes every block of the slab out and reads it back, through the tier's own threads."""

    def __init__(self, folder: Path, slab: Slab) -> None:
        self._slab = slab
        self._outcomes: queue.Queue[Outcome] = queue.Queue()
        self._grown: queue.Queue[int] = queue.Queue()
        cap = 2 * _NUM_BLOCKS * slab.slot_bytes
        self._tier = SsdTier(
            SsdSettings(folder, "bench", cap), slab, _BLOCK_BYTES,
            done=self._outcomes.put, grown=self._grown.put,
        )  # fmt: skip
        num_slots = self._tier.open().num_slots
        self._tier.start()
        while num_slots < _NUM_BLOCKS:
            num_slots = self._grown.get(timeout=_WAIT_SECONDS)
        self._records = [self._fill(index) for index in range(_NUM_BLOCKS)]

    def _fill(self, index: int) -> BlockRecord:
        key = index.to_bytes(16, "little")
        data = os.urandom(4096) * (_BLOCK_BYTES // 4096)
        checksum = self._slab.write_block(index, 1, key, data)
        return BlockRecord(index, 1, key, b"", bytes(32), "", _BLOCK_BYTES, checksum)

    def write(self) -> None:
        self._do([
            WriteOut(job=number, source=SlotRef(record.slot, 1), record=record)
            for number, record in enumerate(self._records)
        ])  # fmt: skip

    def read(self) -> None:
        self._do([
            ReadIn(number, SlotRef(record.slot, 1), record, "first_token")
            for number, record in enumerate(self._records)
        ])  # fmt: skip

    def _do(self, jobs: list[DiskJob]) -> None:
        self._tier.submit(jobs)
        for _ in jobs:
            outcome = self._outcomes.get(timeout=_WAIT_SECONDS)
            assert not outcome.problem, outcome

    def close(self) -> None:
        self._tier.close()


class _RawFile:
    """As many threads as the tier has, whole slots, no checksums and no records."""

    def __init__(self, path: Path, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._memory = mmap.mmap(-1, slot_bytes * _NUM_BLOCKS)
        self._memory[:] = os.urandom(4096) * (len(self._memory) // 4096)
        self._view = memoryview(self._memory)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:  # as the tier does where the file system has no direct I/O
            self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, len(self._memory))
        self._threads = ThreadPoolExecutor(NUM_THREADS)

    def write(self) -> None:
        self._do(os.pwrite)

    def read(self) -> None:
        self._do(lambda fd, part, offset: os.preadv(fd, [part], offset))

    def _do(self, work: Callable[[int, memoryview, int], int]) -> None:
        def one(index: int) -> int:
            start = index * self._slot_bytes
            return work(self._fd, self._view[start : start + self._slot_bytes], start)

        done = list(self._threads.map(one, range(_NUM_BLOCKS)))
        assert done == [self._slot_bytes] * _NUM_BLOCKS

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)
        self._view.release()
        self._memory.close()
