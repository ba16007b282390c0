"""LRU-2: the block whose last use but one lies furthest back goes first."""

from __future__ import annotations

from typing import Final

from workers.core.policies.base import Entry
from workers.core.policies.heat import HeatPolicy
from workers.core.policies.memory import HISTORY_PARAM
from workers.core.policies.ranked import HINT_PARAM

_ONCE: Final = 1e8
"""Seconds by which what was used once goes before all that was used twice."""


class Lru2Policy(HeatPolicy):
    """A block without a second use goes before all others, the least recently used first."""

    name = "lru2"
    declared = {"history_blocks": HISTORY_PARAM, "hint_seconds": HINT_PARAM}

    def _rank(self, entry: Entry) -> float:
        return entry.prev_use if entry.uses > 1 else entry.last_use - _ONCE

    def _fading(self) -> float:
        return 0.0
