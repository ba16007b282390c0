"""One file on SSD: a header page, an index of records, and slots of data; read and written whole.

Data goes past the page cache (O_DIRECT) where the file system allows it; records go through it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final

import xxhash

from workers.pool.records import EMPTY_RECORD, RECORD_BYTES, SlotRecord, pack_record, unpack_record
from workers.pool.tier import TierError

PAGE: Final = mmap.PAGESIZE
SUFFIX: Final = ".ssd"
_MAGIC: Final = b"PERISSD1"
_HEADER: Final = Struct("<8sQQQQ")  # magic, slot bytes, block bytes, most slots, cap in bytes
_SUM: Final = Struct("<Q")
_SCAN_RECORDS: Final = 4096


class SsdFile:
    """Opened and locked by one agent. Slots count from 0; offsets are multiples of a page.

    Where the file is another's by its geometry, or not ours at all, it is made anew.
    """

    def __init__(self, path: Path, slot_bytes: int, block_bytes: int, cap_bytes: int) -> None:
        """TierError: in use, or not to be had."""
        self.path = path
        self.slot_bytes = slot_bytes
        self.block_bytes = block_bytes
        self.cap_bytes = cap_bytes
        self.direct = True
        self._fd = _open_locked(path)
        try:
            self.max_slots = self._check_header()
            self._data_fd = self._open_data()
        except OSError as error:
            os.close(self._fd)
            raise TierError(f"{path}: {error.strerror}") from error
        self._index_bytes = _round_up(self.max_slots * RECORD_BYTES)

    # --- size -------------------------------------------------------------------------------

    @property
    def cap_slots(self) -> int:
        """Slots that the cap allows."""
        return min(self.max_slots, self.cap_bytes // self.bytes_each)

    @property
    def bytes_each(self) -> int:
        """Of disk, for one slot and its record."""
        return self.slot_bytes + RECORD_BYTES

    @property
    def num_slots(self) -> int:
        """Slots within the file as it is now."""
        data = os.fstat(self._fd).st_size - PAGE - self._index_bytes
        return max(0, min(self.max_slots, data // self.slot_bytes))

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self._fd).st_blocks * 512

    def grow(self, num_slots: int) -> None:
        """Have the disk set space aside for so many slots and their records. OSError."""
        first = self.num_slots
        os.posix_fallocate(self._fd, PAGE, max(PAGE, _round_up(num_slots * RECORD_BYTES)))
        start, end = self._data_offset(first), self._data_offset(num_slots)
        if end > start:
            os.posix_fallocate(self._fd, start, end - start)

    def shrink(self, num_slots: int) -> None:
        """Give back what lies beyond."""
        if num_slots < self.num_slots:
            os.ftruncate(self._fd, self._data_offset(num_slots))

    # --- records ----------------------------------------------------------------------------

    def read_record(self, slot: int) -> SlotRecord | None:
        """None: there is none, or a torn one."""
        data = os.pread(self._fd, RECORD_BYTES, self._record_offset(slot))
        return unpack_record(data) if len(data) == RECORD_BYTES else None

    def write_record(self, slot: int, record: SlotRecord | None) -> None:
        """None clears it. OSError."""
        data = EMPTY_RECORD if record is None else pack_record(record)
        if os.pwrite(self._fd, data, self._record_offset(slot)) != len(data):
            raise OSError(errno.ENOSPC, "a record was written in part")

    def records(self) -> Iterator[tuple[int, SlotRecord]]:
        """All whole ones, with their slots."""
        for first in range(0, self.num_slots, _SCAN_RECORDS):
            count = min(_SCAN_RECORDS, self.num_slots - first)
            data = memoryview(os.pread(self._fd, count * RECORD_BYTES, self._record_offset(first)))
            for i in range(len(data) // RECORD_BYTES):
                record = unpack_record(data[i * RECORD_BYTES : (i + 1) * RECORD_BYTES])
                if record is not None:
                    yield first + i, record

    # --- data -------------------------------------------------------------------------------

    def write_slot(self, slot: int, page: memoryview, rest: memoryview) -> None:
        """`page` is the first page of the slot, `rest` what follows. OSError, also when short."""
        buffers = [page, rest] if rest else [page]
        written = os.pwritev(self._data_fd, buffers, self._data_offset(slot))
        if written != self.slot_bytes:
            raise OSError(errno.ENOSPC, f"{written} of {self.slot_bytes} bytes were written")

    def read_slot(self, slot: int, page: memoryview, rest: memoryview) -> bool:
        """Fill both; False where the file ends before. OSError."""
        buffers = [page, rest] if rest else [page]
        return os.preadv(self._data_fd, buffers, self._data_offset(slot)) == self.slot_bytes

    def close(self) -> None:
        os.close(self._data_fd)
        os.close(self._fd)

    # --- inside -----------------------------------------------------------------------------

    def _record_offset(self, slot: int) -> int:
        return PAGE + slot * RECORD_BYTES

    def _data_offset(self, slot: int) -> int:
        return PAGE + self._index_bytes + slot * self.slot_bytes

    def _check_header(self) -> int:
        """The most slots that the index has place for; a file of other geometry is emptied."""
        most = self._most_slots()
        data = os.pread(self._fd, _HEADER.size + _SUM.size, 0)
        if len(data) == _HEADER.size + _SUM.size:
            body, (found,) = data[: _HEADER.size], _SUM.unpack(data[_HEADER.size :])
            magic, slot_bytes, block_bytes, known_most, _ = _HEADER.unpack(body)
            ours = magic == _MAGIC and found == xxhash.xxh3_64_intdigest(body)
            if ours and (slot_bytes, block_bytes) == (self.slot_bytes, self.block_bytes):
                most = known_most
            else:
                os.ftruncate(self._fd, 0)
        elif data:
            os.ftruncate(self._fd, 0)
        self._write_header(most)
        return int(most)

    def _write_header(self, most: int) -> None:
        body = _HEADER.pack(_MAGIC, self.slot_bytes, self.block_bytes, most, self.cap_bytes)
        os.pwrite(self._fd, body + _SUM.pack(xxhash.xxh3_64_intdigest(body)), 0)

    def _most_slots(self) -> int:
        facts = os.fstatvfs(self._fd)
        return max(1, facts.f_blocks * facts.f_frsize // self.bytes_each)

    def _open_data(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            return os.open(self.path, flags | os.O_DIRECT)
        except OSError:  # tmpfs of old kernels, some network file systems
            self.direct = False
            return os.open(self.path, flags)


def claims(folder: Path) -> list[tuple[int, int]]:
    """(cap, allocated) in bytes of every file here that an agent holds open."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError):
            claim = _claim(path)
            if claim is not None:
                found.append(claim)
    return found


def _claim(path: Path) -> tuple[int, int] | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(fd, _HEADER.size, 0)
        if len(data) < _HEADER.size or not data.startswith(_MAGIC) or not _is_locked(fd):
            return None
        return int(_HEADER.unpack(data)[4]), os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TierError(
            f"--ssd-path {path.parent}: {error.strerror}. Name a writable folder."
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise TierError(
            f"{path} is in use by another agent. Stop it, or take another slab name."
        ) from None
    return fd


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
