"""The slab: one shared-memory file of equal slots, made by the agent, mapped by the workers.

A slot is a header of `SLOT_HEADER_BYTES` and the payload of one block. A writer clears the
header, fills the payload and writes the header last; a reader compares the header with what it
was promised before and after it copies, and may verify the checksum. So a reader that comes too
late, or meets a slot that is being rewritten, sees a miss and never another block's bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Final, Self

import xxhash

from workers.core.blocks import SLOT_HEADER_BYTES
from workers.core.errors import ConfigError
from workers.pool.headroom import room_for
from workers.pool.numa import interleave_this_thread, memory_nodes
from workers.pool.prefault import CHUNK_BYTES, Pages, core_share, pause_after

SHM_FOLDER: Final = Path("/dev/shm")  # noqa: S108  shared memory has its place
MAGIC: Final = b"PERISLT1"
_HEADER: Final = Struct("<8sQQQ16s16x")
_NO_MAGIC: Final = bytes(len(MAGIC))
_POOR_SECONDS: Final = 1.0

assert _HEADER.size == SLOT_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """`length` is the payload's bytes, `checksum` xxh3_64 over them."""

    generation: int
    length: int
    checksum: int
    key: bytes


def checksum_of(payload: bytes | bytearray | memoryview) -> int:
    """xxh3_64, as in slot headers and `StoredSlot`."""
    return xxhash.xxh3_64_intdigest(payload)


class Slab:
    """A mapped slab. `attach` it for as long as its agent's incarnation lasts.

    Views that `payload` gave out keep the mapping alive; `close` then leaves it to them.
    """

    def __init__(
        self, mapping: mmap.mmap, slot_bytes: int, header_bytes: int, *, shared: bool = False
    ) -> None:
        """`shared`: the mapping is somebody else's to end."""
        self.slot_bytes = slot_bytes
        self.header_bytes = header_bytes
        self.num_slots = len(mapping) // slot_bytes
        self._mapping = mapping
        self._shared = shared
        self._view = memoryview(mapping)

    @classmethod
    def attach(
        cls, path: str | Path, slot_bytes: int, header_bytes: int = SLOT_HEADER_BYTES
    ) -> Slab:
        """Map an agent's slab for reading and writing. OSError: it is not there."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(fd, 0, mmap.MAP_SHARED)
        finally:
            os.close(fd)
        return cls(mapping, slot_bytes, header_bytes)

    def payload(self, slot: int, length: int | None = None) -> memoryview:
        """The slot's payload, writable; its first `length` bytes if given."""
        start = self._start(slot) + self.header_bytes
        end = self._start(slot) + self.slot_bytes if length is None else start + length
        return self._view[start:end]

    @property
    def everything(self) -> memoryview:
        """All of the mapping."""
        return self._view[:]

    def whole(self, slot: int) -> memoryview:
        """Header and payload, page-aligned."""
        start = self._start(slot)
        return self._view[start : start + self.slot_bytes]

    def begin_write(self, slot: int) -> None:
        """Make the slot unreadable before its payload changes."""
        start = self._start(slot)
        self._view[start : start + len(MAGIC)] = _NO_MAGIC

    def write_header(
        self, slot: int, generation: int, length: int, checksum: int, key: bytes
    ) -> None:
        """Declare the payload whole. The last step of a write."""
        start = self._start(slot)
        packed = _HEADER.pack(MAGIC, generation, length, checksum, key)
        self._view[start + len(MAGIC) : start + len(packed)] = packed[len(MAGIC) :]
        self._view[start : start + len(MAGIC)] = MAGIC

    def read_header(self, slot: int) -> SlotHeader | None:
        """None where nothing whole was ever written, or a write is under way."""
        magic, generation, length, checksum, key = _HEADER.unpack_from(
            self._view, self._start(slot)
        )
        return SlotHeader(generation, length, checksum, key) if magic == MAGIC else None

    def write_block(
        self, slot: int, generation: int, key: bytes, data: bytes | bytearray | memoryview
    ) -> int:
        """Copy a whole block in, by the rules; its checksum."""
        self.begin_write(slot)
        self.payload(slot, len(data))[:] = data
        checksum = checksum_of(data)
        self.write_header(slot, generation, len(data), checksum, key)
        return checksum

    def read_block(self, slot: int, generation: int, key: bytes) -> bytes | None:
        """A verified copy of a block, or None where it is no longer (or not wholly) there."""
        header = self.read_header(slot)
        if header is None or (header.generation, header.key) != (generation, key):
            return None
        data = bytes(self.payload(slot, header.length))
        if self.read_header(slot) != header or checksum_of(data) != header.checksum:
            return None
        return data

    def close(self) -> None:
        """Unmap, unless views into it are still about: they unmap it when they go."""
        self._view.release()
        if not self._shared:
            with contextlib.suppress(BufferError):  # the last view frees it
                self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot}: the slab has {self.num_slots}")
        return slot * self.slot_bytes


class SlabFile:
    """The agent's side: makes the file, has its pages made, unlinks it.

    What a killed agent of this name left is taken over where it has the same size (`adopted`), and
    removed where not; whether its contents are worth anything, the journal beside it tells.
    """

    def __init__(self, name: str, slab_bytes: int, folder: Path = SHM_FOLDER) -> None:
        """ConfigError: no file name, in use, or no room."""
        if not name or "/" in name or name.startswith("."):
            raise ConfigError("slab_name", name, "is no plain file name", "Leave out '/' and '.'.")
        self.path = folder / name
        self.slab_bytes = slab_bytes
        self.touched_bytes = 0
        self.touch_error = ""
        left = _open_left(self.path, slab_bytes)
        self.adopted = left is not None
        self._fd = _make(self.path, slab_bytes) if left is None else left
        self._mapping = mmap.mmap(self._fd, 0, mmap.MAP_SHARED)
        self.numa_nodes = memory_nodes()
        self._stop = threading.Event()
        self._toucher: threading.Thread | None = None

    @property
    def journal_path(self) -> Path:
        return journal_path(self.path)

    def start_touching(self, bytes_per_second: float) -> None:
        """Have the pages made in the background, from the slab's start, at a bounded rate and with a
        share of one core: allocated, cleared, and mapped for `slab`.

        Allocated first: a full /dev/shm shows as `touch_error` instead of a SIGBUS in whoever
        writes first. Waits where the machine, or a cgroup, has little memory left.
        """
        self._toucher = threading.Thread(
            target=self._touch, args=(bytes_per_second,), name="slab-touch", daemon=True
        )
        self._toucher.start()

    def slab(self, slot_bytes: int, header_bytes: int = SLOT_HEADER_BYTES) -> Slab:
        """Cut into slots, over the one mapping of this process, whose pages are made ahead. It ends
        with this."""
        return Slab(self._mapping, slot_bytes, header_bytes, shared=True)

    def close(self) -> None:
        """Stop touching and unlink. Mappings of clients live on until they drop them."""
        self._stop.set()
        if self._toucher is not None:
            self._toucher.join(timeout=5)
        with contextlib.suppress(BufferError):  # the last view frees it
            self._mapping.close()
        self.path.unlink(missing_ok=True)
        self.journal_path.unlink(missing_ok=True)
        os.close(self._fd)

    def _touch(self, bytes_per_second: float) -> None:
        interleave_this_thread(self.numa_nodes)
        pages, share = Pages(self._mapping), core_share()
        able, took = True, 0.0
        while self.touched_bytes < self.slab_bytes:
            length = min(CHUNK_BYTES, self.slab_bytes - self.touched_bytes)
            if self._stop.wait(max(length / bytes_per_second, pause_after(took, share))):
                return
            if not room_for(length):
                took = 0.0
                self._stop.wait(_POOR_SECONDS)
                continue
            began = time.monotonic()
            try:
                os.posix_fallocate(self._fd, self.touched_bytes, length)
            except OSError as error:
                self.touch_error = str(error)
                return
            able = able and pages.populate(self.touched_bytes, length)
            self.touched_bytes += length
            took = time.monotonic() - began


def journal_path(slab: Path) -> Path:
    """Where the agent notes what is in the slab's slots."""
    return slab.with_name(f"{slab.name}.journal")


def _open_left(path: Path, slab_bytes: int) -> int | None:
    """A locked descriptor of what a former agent left, if it is of use; else it is removed.

    ConfigError where an agent that lives still holds the slab.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        journal_path(path).unlink(missing_ok=True)
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(
            "slab_name", path.name, "is in use by another agent", "Stop it, or take another name."
        ) from None
    if os.fstat(fd).st_size == slab_bytes and journal_path(path).exists():
        return fd
    os.close(fd)
    path.unlink(missing_ok=True)
    journal_path(path).unlink(missing_ok=True)
    return None


def _make(path: Path, slab_bytes: int) -> int:
    _check_room(path.parent, slab_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.ftruncate(fd, slab_bytes)
    return fd


def _check_room(folder: Path, slab_bytes: int) -> None:
    """ConfigError where the file system cannot hold the slab."""
    facts = os.statvfs(folder)
    free_bytes = facts.f_bavail * facts.f_frsize
    if slab_bytes < mmap.PAGESIZE or slab_bytes > free_bytes:
        raise ConfigError(
            "slab_bytes",
            slab_bytes,
            f"{folder} has {free_bytes} bytes free and a slab needs at least a page",
            "Take a smaller slab, or enlarge /dev/shm (mount -o remount,size=...).",
        )
