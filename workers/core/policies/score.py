"""Recency x decayed frequency x distinct sharers, each with a weight.

The product of the three as a logarithm, in seconds of recency: what one halving of recency costs,
a doubling of the other two earns, times their weights.
"""

from __future__ import annotations

from math import log2
from typing import Final

from workers.core.policies.base import Entry
from workers.core.policies.heat import HALF_LIFE_MEANING, SHARER_BITS, HeatPolicy
from workers.core.policies.memory import HISTORY_PARAM
from workers.core.policies.params import Param
from workers.core.policies.ranked import HINT_PARAM

_SHARERS_LOG: Final = [
    log2(
        max(1.0, SHARER_BITS * (log2(SHARER_BITS / max(1, SHARER_BITS - bits)) / log2(2.718281828)))
    )
    for bits in range(SHARER_BITS + 1)
]
"""log2 of how many distinct requests set so many bits, by linear counting."""


class ScorePolicy(HeatPolicy):
    """A hundred requests that use a block once each outweigh one that uses it a hundred times."""

    name = "score"
    counts_sharers = True
    declared = {
        "half_life_seconds": Param(240, 1, 86_400, HALF_LIFE_MEANING),
        "recency_half_life_seconds": Param(
            240, 1, 86_400, "the age that halves a block's score, in seconds"
        ),
        "frequency_weight": Param(1, 0, 10, "the exponent of the decayed number of uses"),
        "sharers_weight": Param(0.25, 0, 10, "the exponent of the number of distinct requests"),
        "history_blocks": HISTORY_PARAM,
        "hint_seconds": HINT_PARAM,
    }

    def _rank(self, entry: Entry) -> float:
        params = self.params
        weighted = params["frequency_weight"] * log2(entry.heat)
        weighted += params["sharers_weight"] * _SHARERS_LOG[entry.sharers.bit_count()]
        fading = params["frequency_weight"] / params["half_life_seconds"]
        return entry.last_use + weighted / (1.0 / params["recency_half_life_seconds"] + fading)
