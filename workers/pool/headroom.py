"""How much memory may still be taken: by the machine, and by the cgroups that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
KEPT_SHARE: Final = 0.05
KEPT_BYTES: Final = 256 << 20
"""Of the machine's memory or a cgroup's limit so much is left alone, whichever is more."""


def room_for(num_bytes: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> bool:
    """So much can be allocated and what is to be kept stays free. True where nobody says."""
    return all(
        free - num_bytes >= max(KEPT_BYTES, int(KEPT_SHARE * total))
        for total, free in _bounds(proc, cgroups)
    )


def _bounds(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Total and free bytes of whatever bounds this process."""
    facts = _numbers(proc / "meminfo", 1024)
    if "MemTotal:" in facts and "MemAvailable:" in facts:
        yield facts["MemTotal:"], facts["MemAvailable:"]
    for folder in _folders(proc, cgroups):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, taken = _number(folder / limit), _number(folder / used)
            if most is not None and taken is not None:
                given_back = _numbers(folder / "memory.stat").get(cache, 0)
                yield most, most - taken + given_back


def _folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Of this process's memory cgroup and those above it, in version 2 and 1."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = cgroups if not controllers else cgroups / "memory"
        if controllers and "memory" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _number(path: Path) -> int | None:
    """None: it is not there, or there is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(path: Path, unit: int = 1) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {f[0]: int(f[1]) * unit for f in fields if len(f) > 1 and f[1].isdigit()}
