"""How several agents share one disk. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

DEFAULT_SHARE: Final = 0.10
"""Of what is free, where no size is given."""
FLOOR_SHARE: Final = 0.05
MAX_FLOOR_BYTES: Final = 1 << 30


def default_cap(free_bytes: int) -> int:
    """A cap that runs no disk full."""
    return int(free_bytes * DEFAULT_SHARE)


def floor_bytes(total_bytes: int) -> int:
    """What is left free for others, always: 5 % of the disk, at most 1 GiB."""
    return min(int(total_bytes * FLOOR_SHARE), MAX_FLOOR_BYTES)


def fair_shares(budget_bytes: int, caps: Sequence[int]) -> list[int]:
    """Max-min fair: nobody gets more than its cap, what one leaves goes to the others evenly."""
    shares = [0] * len(caps)
    left = max(0, budget_bytes)
    waiting = sorted(range(len(caps)), key=lambda i: caps[i])
    while waiting:
        even = left // len(waiting)
        first = waiting.pop(0)
        shares[first] = min(caps[first], even)
        left -= shares[first]
    return shares
