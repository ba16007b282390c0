"""On which memory nodes of the machine a slab lies.

A slab is spread evenly over all of them: workers and network cards sit at any of them, and none is
to be the only one that is near. Where there is one node, or the kernel does not let us, nothing is
done and the page goes where the thread runs that touches it first.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

NODES_FOLDER: Final = Path("/sys/devices/system/node")
_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
_MPOL_INTERLEAVE: Final = 3
_MAX_NODES: Final = 64


def memory_nodes(folder: Path = NODES_FOLDER) -> list[int]:
    """Nodes with memory, as the kernel numbers them; [] where it does not say."""
    try:
        return parse_nodes((folder / "has_memory").read_text())
    except (OSError, ValueError):
        return []


def parse_nodes(text: str) -> list[int]:
    """The kernel's list format: "0", "0-1", "0,2-3". ValueError."""
    nodes: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, dash, last = part.partition("-")
            nodes += range(int(first), int(last if dash else first) + 1)
    return nodes


def interleave_this_thread(nodes: list[int]) -> bool:
    """Pages that this thread is the first to allocate alternate between the nodes; True if so."""
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if len(nodes) < 2 or number is None or max(nodes) >= _MAX_NODES:
        return False
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    libc = ctypes.CDLL(None, use_errno=True)
    done: int = libc.syscall(number, _MPOL_INTERLEAVE, ctypes.byref(mask), _MAX_NODES + 1)
    return done == 0
