"""Facts about this process, and its end."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Final

PARENT_PID_VARIABLE: Final = "PERILUNE_PARENT_PID"
_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(signum: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send us `signum` when our parent dies. Linux; elsewhere nothing happens.

    The kernel means the parent's *thread* that started us: a launcher must start processes from
    a thread that lives as long as they shall. It is not inherited: each process asks for itself.
    A launcher that puts its pid into PERILUNE_PARENT_PID closes the gap before this call.
    """
    expected = int(os.environ.get(PARENT_PID_VARIABLE) or os.getppid())
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return
    prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != expected:
        os.kill(os.getpid(), signum)


def private_rss_bytes() -> int:
    """Resident memory of this process without shared memory, such as a slab; 0 if unknown."""
    return _status_kib("RssAnon") + _status_kib("RssFile")


def rss_bytes() -> int:
    """All resident memory of this process; 0 if unknown."""
    return _status_kib("VmRSS")


def _status_kib(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0
