"""Decayed reuse frequency, the default.

LRU, except that a block that was reused lately counts as younger: by up to 340 s once it was reused
at all, and by 10 s more for each doubling of its uses. Both fade as the uses lie back: what a use
is worth halves every 170 s. So a block of a running session outlives a prompt that came once, and
what thousands share outlives both.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import Final

from workers.core.policies.base import Entry
from workers.core.policies.heat import HALF_LIFE_MEANING, HeatPolicy
from workers.core.policies.memory import HISTORY_PARAM
from workers.core.policies.params import Param
from workers.core.policies.ranked import HINT_PARAM

_HALF_OF_BONUS: Final = 0.35
"""Decayed earlier uses that earn half of the bonus: one recent reuse earns three quarters."""


class DecayPolicy(HeatPolicy):
    """`heat - 1` is the decayed number of uses before the last one."""

    name = "decay"
    declared = {
        "half_life_seconds": Param(170, 1, 86_400, HALF_LIFE_MEANING),
        "reuse_seconds": Param(
            340, 0, 86_400, "by how many seconds a reused block counts as younger, at most"
        ),
        "doubling_seconds": Param(
            10, 0, 86_400, "by how many seconds more it does for each doubling of its uses"
        ),
        "history_blocks": HISTORY_PARAM,
        "hint_seconds": HINT_PARAM,
    }

    def __init__(self, params: Mapping[str, float] | None = None) -> None:
        super().__init__(params)
        self._reuse, self._doubling = self._bonuses()

    def _rank(self, entry: Entry) -> float:
        earlier = entry.heat - 1.0
        reused = earlier / (earlier + _HALF_OF_BONUS)
        return entry.last_use + self._reuse * reused + self._doubling * log2(entry.heat)

    def _tuned(self, old: Mapping[str, float], now: float) -> None:
        self._reuse, self._doubling = self._bonuses()
        super()._tuned(old, now)

    def _bonuses(self) -> tuple[float, float]:
        return self.params["reuse_seconds"], self.params["doubling_seconds"]
