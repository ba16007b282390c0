"""Which would-be rejections are let in, to learn how many rejections are wrong."""

import math
from typing import Final

MAX_DENSER: Final = 3
"""Doublings of the share while probe after probe keeps its SLO."""


class ProbeTurns:
    """One in 1/share on average, at uneven distances, never one of the first few: who rejects
    everything for a trial sees everything rejected. While probe after probe keeps its SLO, there
    are more of them: rejections are wrong, and only probes can show it."""

    __slots__ = ("_denser", "_left")

    def __init__(self) -> None:
        self._left: int | None = None
        self._denser = 0

    def is_due(self, share: float, draw: float) -> bool:
        """Called once for each would-be rejection; `draw`: uniform in [0, 1)."""
        if share <= 0:
            return False
        share = min(1.0, share * 2**self._denser)
        if self._left is None:
            self._left = _distance(share, draw)
        self._left = min(self._left, math.ceil(1.5 / share)) - 1  # the share may have risen
        if self._left > 0:
            return False
        self._left = _distance(share, draw)
        return True

    def ended(self, *, met: bool) -> None:
        """One that was let in has kept its SLO, or has not."""
        self._denser = min(MAX_DENSER, self._denser + 1) if met else 0


def _distance(share: float, draw: float) -> int:
    """From half to one and a half of the mean: 10 to 30 for a share of 0.05."""
    return max(1, round((0.5 + draw) / share))
