"""Where the slab's pages lie among the machine's memory nodes, and where they shall lie.

Policies are set on the slab's file (mbind), so they hold for whoever allocates a page of it first;
what is there already is moved where this process alone has it mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Final

from workers.core.rdma_choice import Region, node_of_pages

_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_MOVE_PAGES: Final = {"x86_64": 279, "aarch64": 239}
_MPOL_PREFERRED: Final = 1
_MPOL_MF_MOVE: Final = 2
_MAX_NODES: Final = 64
_BATCH: Final = 4096
SAMPLES: Final = 4
"""Pages of a slot that are looked at."""


def place(address: int, regions: Sequence[Region]) -> bool:
    """Have these bytes, counted from `address`, lie at their nodes; False: the kernel says no."""
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    done = True
    for region in regions:
        start, end = _pages(address + region.start, region.num_bytes)
        mask = ctypes.c_ulong(1 << region.node)
        done &= not libc.syscall(
            number, ctypes.c_void_p(start), ctypes.c_ulong(end - start), _MPOL_PREFERRED,
            ctypes.byref(mask), _MAX_NODES + 1, _MPOL_MF_MOVE,
        )  # fmt: skip
    return done


def slot_nodes(address: int, slot_bytes: int, num_slots: int) -> list[int]:
    """The memory node of each slot; -1 where it is spread over several, or not known."""
    step = max(1, slot_bytes // SAMPLES)
    places = [address + slot * slot_bytes + i * step for slot in range(num_slots) for i in range(SAMPLES)]  # fmt: skip
    nodes: list[int] = []
    for start in range(0, len(places), _BATCH):
        nodes += page_nodes(places[start : start + _BATCH])
    return [node_of_pages(nodes[at : at + SAMPLES]) for at in range(0, len(nodes), SAMPLES)]


def page_nodes(addresses: Sequence[int]) -> list[int]:
    """Of the pages at these addresses; negative where there is none yet, or nobody says."""
    number = _MOVE_PAGES.get(os.uname().machine)
    count = len(addresses)
    found = (ctypes.c_int * count)(*([-1] * count))
    if number is not None:
        pages = (ctypes.c_void_p * count)(*addresses)
        # without target nodes the call only tells where the pages are
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(number, 0, ctypes.c_ulong(count), pages, None, found, 0)
    return list(found)


def _pages(start: int, num_bytes: int) -> tuple[int, int]:
    """Whole pages that cover these bytes."""
    size = mmap.PAGESIZE
    return start // size * size, -(-(start + num_bytes) // size) * size
