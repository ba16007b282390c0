"""Least frequently used first. Uses are forgotten slowly, or what was hot once would stay for ever."""

from __future__ import annotations

from math import log2

from workers.core.policies.base import Entry
from workers.core.policies.heat import HALF_LIFE_MEANING, HeatPolicy
from workers.core.policies.memory import HISTORY_PARAM
from workers.core.policies.params import Param
from workers.core.policies.ranked import HINT_PARAM

_YEAR_SECONDS = 31_536_000


class LfuPolicy(HeatPolicy):
    """The number of uses decides: one doubling of it outweighs a half life of recency."""

    name = "lfu"
    declared = {
        "half_life_seconds": Param(3600, 1, _YEAR_SECONDS, HALF_LIFE_MEANING),
        "history_blocks": Param(0, 0, HISTORY_PARAM.high, HISTORY_PARAM.meaning),
        "hint_seconds": Param(7200, 0, _YEAR_SECONDS, HINT_PARAM.meaning),
    }

    def _rank(self, entry: Entry) -> float:
        return entry.last_use + log2(entry.heat) * self.params["half_life_seconds"]
