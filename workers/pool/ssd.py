"""The SSD tier: a file, a few threads that copy between it and the slab, one that makes it grow.

Reads for a first token go before reads in bulk, and these before writes. The file grows step by
step up to its cap, by a fair share where several agents use the disk, and never beyond what leaves
the disk its floor of free space.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from workers.core.blocks import SLOT_HEADER_BYTES
from workers.core.disk_shares import default_cap, fair_shares, floor_bytes
from workers.core.tiers import BlockRecord, DiskJob, Forget, Outcome, Problem, ReadIn, WriteOut
from workers.pool.arena import Slab, checksum_of
from workers.pool.records import SlotRecord
from workers.pool.ssd_file import PAGE, SUFFIX, SsdFile, claims
from workers.pool.tier import Done, Tier, TierError, TierFacts, TierOpened

NUM_THREADS: Final = 4
GROW_BYTES: Final = 64 << 20
GROW_SECONDS: Final = 0.05
WATCH_SECONDS: Final = 2.0
CLOSE_SECONDS: Final = 10.0
_LOCK_NAME: Final = ".perilune-ssd.lock"
_RANK: Final = {"first_token": 0, "batch": 1}
_WRITE_RANK: Final = 2
_END_RANK: Final = -1
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SsdSettings:
    """`cap_bytes` 0: a tenth of what is free at the start. `name` is the slab's."""

    folder: Path
    name: str
    cap_bytes: int = 0

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}{SUFFIX}"


@dataclass(order=True, slots=True)
class _Ticket:
    rank: int
    number: int
    job: DiskJob | None = field(compare=False)


class SsdTier(Tier):
    """`grown` hears of the number of slots there are by now, and `full` when writes must stop
    (True) and may go on (False); both from the growing thread."""

    def __init__(
        self,
        settings: SsdSettings,
        slab: Slab,
        block_bytes: int,
        *,
        done: Done,
        grown: Callable[[int], None] = lambda _: None,
        full: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._slab = slab
        self._block_bytes = block_bytes
        self._done, self._grown, self._full = done, grown, full
        self._file: SsdFile | None = None
        self._state = "rebuilding"
        self._queue: queue.PriorityQueue[_Ticket] = queue.PriorityQueue()
        self._number = 0
        self._records = threading.Lock()
        self._closing = threading.Event()
        self._refused = threading.Event()  # the disk had no room for a write
        self._threads: list[threading.Thread] = []

    # --- the seam ---------------------------------------------------------------------------

    def open(self) -> TierOpened:
        settings = self._settings
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
            free = _free_bytes(settings.folder)
        except OSError as error:
            self._state = f"{settings.folder}: {error.strerror}"
            raise TierError(self._state) from error
        cap = settings.cap_bytes or default_cap(free + _size_of(settings.path))
        try:
            file = SsdFile(settings.path, self._slab.slot_bytes, self._block_bytes, cap)
        except TierError as error:
            self._state = str(error)
            raise
        file.shrink(file.cap_slots)
        records = [_disk_record(slot, record) for slot, record in file.records()]
        self._file = file
        self._state = "ok"
        return TierOpened(file.num_slots, file.cap_slots, records)

    def start(self) -> None:
        targets = [self._work] * NUM_THREADS + [self._grow_and_watch]
        for number, target in enumerate(targets):
            thread = threading.Thread(target=target, name=f"ssd-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, jobs: Iterable[DiskJob]) -> None:
        for job in jobs:
            rank = _RANK[job.urgency] if isinstance(job, ReadIn) else _WRITE_RANK
            self._number += 1
            self._queue.put(_Ticket(rank, self._number, job))

    def facts(self) -> TierFacts:
        file = self._file
        try:
            free = _free_bytes(self._settings.folder)
        except OSError:
            free = None
        return TierFacts(
            state=self._state,
            path=str(self._settings.path),
            cap_bytes=0 if file is None else file.cap_bytes,
            allocated_bytes=0 if file is None else file.allocated_bytes,
            free_device_bytes=free,
        )

    def close(self) -> None:
        self._closing.set()
        for _ in self._threads:
            self._queue.put(_Ticket(_END_RANK, 0, None))
        for thread in self._threads:
            thread.join(timeout=CLOSE_SECONDS)
        if self._file is not None and not any(thread.is_alive() for thread in self._threads):
            self._file.close()
            self._file = None
        self._state = "off"

    # --- copying ----------------------------------------------------------------------------

    def _work(self) -> None:
        page = mmap.mmap(-1, PAGE)  # page-aligned, as O_DIRECT wants it
        with memoryview(page) as view:
            while not self._closing.is_set():
                job = self._queue.get().job
                if job is None:
                    return
                self._perform(job, view)

    def _perform(self, job: DiskJob, page: memoryview) -> None:
        file = self._file
        assert file is not None, "threads start after the file is open"
        began = time.perf_counter()
        problem: Problem = ""
        message = ""
        try:
            match job:
                case Forget():
                    self._forget(file, job)
                case WriteOut():
                    problem = self._write_out(file, job, page)
                case ReadIn():
                    problem = self._read_in(file, job, page)
        except OSError as error:
            message = f"{file.path}: {error.strerror or error}"
            problem = "full" if error.errno in _NO_ROOM else "io"
            if isinstance(job, WriteOut):
                self._refused.set()
            _log.warning("ssd_failed what=%s error=%s", type(job).__name__, message)
        except ValueError as error:  # the slab is unmapped: we are closing
            problem, message = "io", str(error)
        if not isinstance(job, Forget):
            self._done(Outcome(job.job, problem, time.perf_counter() - began, message))

    def _write_out(self, file: SsdFile, job: WriteOut, page: memoryview) -> Problem:
        slab, record, source = self._slab, job.record, job.source
        header = slab.read_header(source.slot)
        if header is None or (header.generation, header.key) != (source.generation, record.key):
            return "source"
        if checksum_of(slab.payload(source.slot, record.length)) != record.checksum:
            return "source"
        whole = slab.whole(source.slot)
        page[:] = whole[:PAGE]
        page[:SLOT_HEADER_BYTES] = bytes(SLOT_HEADER_BYTES)
        with self._records:
            file.write_record(record.slot, None)
        file.write_slot(record.slot, page, whole[PAGE:])
        with self._records:
            file.write_record(record.slot, _slot_record(record))
        return ""

    def _read_in(self, file: SsdFile, job: ReadIn, page: memoryview) -> Problem:
        slab, record, target = self._slab, job.record, job.target
        if file.read_record(record.slot) != _slot_record(record):
            return "missing"
        slab.begin_write(target.slot)
        whole = slab.whole(target.slot)
        if not file.read_slot(record.slot, page, whole[PAGE:]):
            return "short"
        whole[SLOT_HEADER_BYTES:PAGE] = page[SLOT_HEADER_BYTES:]
        if checksum_of(slab.payload(target.slot, record.length)) != record.checksum:
            return "checksum"
        slab.write_header(
            target.slot, target.generation, record.length, record.checksum, record.key
        )
        return ""

    def _forget(self, file: SsdFile, job: Forget) -> None:
        with self._records:
            record = file.read_record(job.disk_slot)
            if record is not None and record.generation <= job.disk_generation:
                file.write_record(job.disk_slot, None)

    # --- growing ----------------------------------------------------------------------------

    def _grow_and_watch(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            grew = self._grow()
            pause = GROW_SECONDS if grew else WATCH_SECONDS
            if self._refused.is_set():
                is_full = not self._has_room()
                if not is_full:
                    self._refused.clear()
                self._full(is_full)

    def _has_room(self) -> bool:
        """Is the disk above its floor again?"""
        facts = os.statvfs(self._settings.folder)
        free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
        return free > floor_bytes(total)

    def _grow(self) -> bool:
        """One step, if there is more to be had; whether there was."""
        file = self._file
        assert file is not None, "threads start after the file is open"
        before = file.num_slots
        step = max(1, GROW_BYTES // file.bytes_each)
        wanted = min(before + step, file.cap_slots)
        if wanted <= before:
            self._state = "ok"
            return False
        try:
            with _FolderLock(self._settings.folder):
                allowed = min(wanted, self._allowed_bytes() // file.bytes_each)
                if allowed <= before:
                    self._note_full(before)
                    return False
                file.grow(allowed)
        except OSError as error:
            self._state = f"full: {file.path}: {error.strerror}; {before} slots are in use"
            return False
        self._state = "ok"
        self._grown(file.num_slots)
        return True

    def _note_full(self, num_slots: int) -> None:
        file = self._file
        assert file is not None, "it is open"
        state = (
            f"full: the disk under {self._settings.folder} leaves "
            f"{num_slots * file.bytes_each >> 20} of {file.cap_bytes >> 20} MiB to this tier. "
            "Free some space, or lower --ssd-gib."
        )
        if state != self._state:
            _log.warning("ssd_full path=%s %s", file.path, state)
        self._state = state

    def _allowed_bytes(self) -> int:
        """What this file may have in all, beside other agents' files on the disk."""
        file = self._file
        assert file is not None, "it is open"
        facts = os.statvfs(self._settings.folder)
        free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
        others = claims(self._settings.folder)  # with our own
        budget = free - floor_bytes(total) + sum(allocated for _, allocated in others)
        mine = (file.cap_bytes, file.allocated_bytes)
        at = others.index(mine) if mine in others else -1
        if at < 0:
            return file.allocated_bytes + max(0, free - floor_bytes(total))
        return fair_shares(budget, [cap for cap, _ in others])[at]


class _FolderLock:
    """Held while an agent decides how much of the disk it may take."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _LOCK_NAME

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _free_bytes(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _slot_record(record: BlockRecord) -> SlotRecord:
    return SlotRecord(
        "stored", record.generation, record.key, record.parent, record.namespace,
        record.tenant, record.length, record.checksum,
    )  # fmt: skip


def _disk_record(slot: int, record: SlotRecord) -> BlockRecord:
    return BlockRecord(
        slot, record.generation, record.key, record.parent, record.namespace, record.tenant,
        record.length, record.checksum,
    )  # fmt: skip
