"""Peak resident memory of process trees, sampled."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

import psutil

PROC: Final = Path("/proc")
_SHARED_FOLDER: Final = "/dev/shm/"
_BLOCK_BYTES: Final = 512  # st_blocks, stat(2)


class PeakRss:
    """Samples the memory of `pids` and all their descendants until closed: see `tree_rss_bytes`."""

    def __init__(self, pids: list[int], every_seconds: float = 0.5) -> None:
        self._pids = pids
        self._every = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-rss", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> PeakRss:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.peak_bytes = max(self.peak_bytes, tree_rss_bytes(self._pids))
            self._stop.wait(self._every)


def tree_rss_bytes(pids: list[int]) -> int:
    """What these processes and their descendants have in memory; the gone count 0.

    Files of shared memory, such as slabs, count once, with all that was allocated for them, however
    many processes map them. Pages of programs and libraries count once a process.
    """
    total = 0
    files: set[str] = set()
    for pid in pids:
        try:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            own, shared = _resident(process.pid)
            total += own
            if shared:
                files |= _shared_files(process.pid)
    return total + sum(map(_allocated, files))


def _resident(pid: int) -> tuple[int, int]:
    """Bytes without shared memory, and of shared memory."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    shared = sizes.get("RssShmem:", 0)
    return (sizes.get("VmRSS:", 0) - shared) * 1024, shared * 1024


def _shared_files(pid: int) -> set[str]:
    try:
        lines = (PROC / str(pid) / "maps").read_text().splitlines()
    except OSError:
        return set()
    found = (line.partition(_SHARED_FOLDER)[2] for line in lines if _SHARED_FOLDER in line)
    return {_SHARED_FOLDER + name for name in found}


def _allocated(path: str) -> int:
    try:
        return os.stat(path).st_blocks * _BLOCK_BYTES
    except OSError:
        return 0  # unlinked
