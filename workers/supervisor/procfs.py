"""What Linux says of processes. Every reader answers None or empty for a process that is gone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workers.core.liveness import Reading

PROC = Path("/proc")
DEAD_STATES = frozenset("ZX")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A pid with its start time in clock ticks since boot: pids are used again, pairs are not."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Is it this very process, and no zombie?"""
        stat = _stat(self.pid)
        return stat is not None and stat[0] not in DEAD_STATES and stat[2] == self.start_ticks


def identify(pid: int) -> ProcessIdentity | None:
    """Identity of a running process."""
    stat = _stat(pid)
    return None if stat is None else ProcessIdentity(pid, stat[2])


def reading(pid: int) -> Reading | None:
    """What it does now; of all its threads, but for its state and its waiting."""
    fields = _stat_fields(pid)
    if fields is None:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Reading(fields[0], ticks / CLOCK_TICKS, _waited_seconds(pid), int(fields[9]))


def _waited_seconds(pid: int) -> float:
    """Ready to run and not running; 0 where the kernel keeps no account of it."""
    try:
        return int((PROC / str(pid) / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def session_members(session: int) -> list[int]:
    """Pids of all processes of a session that still run (no zombies)."""
    members = []
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None and stat[1] == session and stat[0] not in DEAD_STATES:
            members.append(pid)
    return members


def is_resource_tracker(pid: int) -> bool:
    """Python's, which removes what processes of its session leave in /dev/shm."""
    return RESOURCE_TRACKER in _arguments(pid)


def own_memory_bytes(pid: int) -> int | None:
    """Resident memory without shared memory (so without the slab)."""
    sizes = _status_kib(pid)
    if "VmRSS" not in sizes:
        return None
    return (sizes["VmRSS"] - sizes.get("RssShmem", 0)) * 1024


def session_memory_bytes(session: int) -> int | None:
    """Sum of `own_memory_bytes` over a session; None once it is gone."""
    sizes = [own_memory_bytes(pid) for pid in session_members(session)]
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def available_memory_bytes() -> int | None:
    """What the kernel thinks can be had without swapping."""
    try:
        for line in (PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def command_line(pid: int) -> str:
    """Its arguments, shortened; empty where it may not be read."""
    return _arguments(pid)[:120]


def _arguments(pid: int) -> str:
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def find_processes(matches: Callable[[list[str]], bool]) -> list[int]:
    """Pids whose arguments match, as far as this user may see."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            raw = (PROC / str(pid) / "cmdline").read_bytes()
            if matches([word.decode(errors="replace") for word in raw.split(b"\0")]):
                found.append(pid)
    return found


def listener_of(port: int) -> int | None:
    """Pid of the process that listens on this TCP port, as far as this user may see."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    for pid in _pids():
        try:
            for link in (PROC / str(pid) / "fd").iterdir():
                if os.readlink(link) in inodes:
                    return pid
        except OSError:
            continue
    return None


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            is_listening = fields[3] == "0A"
            if is_listening and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROC) if name.isdigit()]
    except OSError:
        return []


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, session, start time in ticks)."""
    fields = _stat_fields(pid)
    return None if fields is None else (fields[0], int(fields[3]), int(fields[19]))


def _stat_fields(pid: int) -> list[str] | None:
    """As in proc(5), from the state on, which is its third."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the command's name may hold spaces


def _status_kib(pid: int) -> dict[str, int]:
    sizes = {}
    try:
        text = (PROC / str(pid) / "status").read_text()
    except OSError:
        return {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[key] = int(value.split()[0])
    return sizes
