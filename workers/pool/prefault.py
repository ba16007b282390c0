"""Pages of a slab before their first use.

The first write to a page of shared memory costs several times as much as the copy itself: the page
is allocated, cleared and mapped, 4 KiB at a time, and mapped once more by each process. So the agent
has a slab's pages made in the background (`SlabFile.start_touching`), and who copies into or out of
them has those that exist mapped (`PageMapper`), both ahead of need.

Nothing is written, and no page comes to be that the slab does not have. Where the kernel is older
than Linux 5.14 (MADV_POPULATE_READ), the first use pays as before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Final

CHUNK_BYTES: Final = 16 << 20
_SLICE_BYTES: Final = 256 * 1024
"""A thread that maps or unmaps memory may have to wait for one call."""
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, asm-generic/mman-common.h
_LOOK_AGAIN_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 600.0
_CORES_FOR_ONE: Final = 16
_LEAST_SHARE: Final = 0.125

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def core_share() -> float:
    """Of one core, that the background may take: all of it where there are sixteen."""
    return max(_LEAST_SHARE, min(1.0, len(os.sched_getaffinity(0)) / _CORES_FOR_ONE))


def pause_after(took_seconds: float, share: float) -> float:
    """So that work which took so long takes that share of a core."""
    return took_seconds * (1.0 / share - 1.0)


class Pages:
    """The pages of a writable mapping, or of a view of all of it: it stays as long as this does."""

    def __init__(self, mapping: mmap.mmap | memoryview) -> None:
        self.num_bytes = len(mapping)
        self._anchor = ctypes.c_char.from_buffer(mapping)
        self._address = ctypes.addressof(self._anchor)

    def populate(self, start: int, length: int) -> bool:
        """Have these there, cleared and mapped; False: the kernel cannot, or has no room.

        Other threads of the interpreter run meanwhile.
        """
        for offset in range(start, start + length, _SLICE_BYTES):
            size = min(_SLICE_BYTES, start + length - offset)
            if _libc.madvise(self._address + offset, size, _POPULATE_READ) != 0:
                return False
        return True

    def exist(self, start: int, length: int) -> bool:
        """All of them are in memory, whoever had them made."""
        found = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        done = _libc.mincore(self._address + start, length, found)
        return done == 0 and b"\0" not in found.raw


class PageMapper:
    """Maps a slab's pages into this process as they come to be, from its start, in a thread that ends
    with the slab's last page, or when for long no more come."""

    def __init__(self, view: memoryview, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` runs first in the thread."""
        self._pages = Pages(view)
        self._settle = settle
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slab-map", daemon=True)
        self.mapped_bytes = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Idempotent; bounded."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        self._settle()
        pages, share, pause = self._pages, core_share(), 0.0
        moved_at = time.monotonic()
        while self.mapped_bytes < pages.num_bytes and not self._stop.wait(pause):
            length = min(CHUNK_BYTES, pages.num_bytes - self.mapped_bytes)
            if not pages.exist(self.mapped_bytes, length):
                if time.monotonic() - moved_at > _PATIENCE_SECONDS:
                    return
                pause = _LOOK_AGAIN_SECONDS
                continue
            began = time.monotonic()
            if not pages.populate(self.mapped_bytes, length):
                return
            self.mapped_bytes += length
            moved_at = time.monotonic()
            pause = pause_after(moved_at - began, share)
