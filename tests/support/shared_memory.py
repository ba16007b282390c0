"""What engines, agents and tests leave in /dev/shm."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from workers.supervisor.procfs import find_processes

SHM: Final = Path("/dev/shm")
SETTLE_SECONDS: Final = 20.0
OURS: Final = ("psm_", "sem.mp-", "perilune-")
_TRACKED: Final = ("psm_", "sem.mp-")


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails where something is there afterwards that was not before and that nobody uses.

    Other runs on this machine are let be: what a process has mapped or was started with is in
    use, and what resource trackers remove is theirs while one lives.
    """
    before = _names()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := _unused(_names() - before):
        assert time.monotonic() < deadline, f"left in {SHM}: {', '.join(sorted(left))}"
        time.sleep(0.5)


def remove_slab(name: str) -> None:
    """What an agent that was killed has left: its slab, and the journal beside it."""
    for left in (name, f"{name}.journal"):
        (SHM / left).unlink(missing_ok=True)


def _names() -> set[str]:
    return {name for name in os.listdir(SHM) if name.startswith(OURS)}


def _unused(names: set[str]) -> set[str]:
    left = names - _mapped() if names else names
    left -= {name for name in left if _named(name.removesuffix(".journal"))}
    tracked = {name for name in left if name.startswith(_TRACKED)}
    return left - tracked if tracked and _trackers_live() else left


def _mapped() -> set[str]:
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        found |= {line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}
    return found


def _named(name: str) -> bool:
    """An agent that waits for its first worker has its slab not mapped yet."""
    return bool(find_processes(lambda words: name in words))


def _trackers_live() -> bool:
    return bool(find_processes(lambda words: any("resource_tracker" in word for word in words)))
