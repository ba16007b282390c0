"""Peak resident memory of process trees, sampled."""

from __future__ import annotations

import threading

import psutil


class PeakRss:
    """Samples the summed PSS-free RSS of `pids` and all their descendants until closed.

    Shared pages count once per process, so a slab mapped by three processes counts up to three
    times; the figure is an upper bound, the same way for every engine compared.
    """

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
    """Summed RSS of these processes and their descendants; the gone count 0."""
    total = 0
    for pid in pids:
        try:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
    return total
