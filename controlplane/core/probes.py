"""Which would-be rejections are let in, to learn how many rejections are wrong."""

import math


class ProbeTurns:
    """One in 1/share on average, at uneven distances, never one of the first few: who rejects
    everything for a trial sees everything rejected."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: int | None = None

    def is_due(self, share: float, draw: float) -> bool:
        """Called once for each would-be rejection; `draw`: uniform in [0, 1)."""
        if share <= 0:
            return False
        if self._left is None:
            self._left = _distance(share, draw)
        self._left = min(self._left, math.ceil(1.5 / share)) - 1  # the share may have risen
        if self._left > 0:
            return False
        self._left = _distance(share, draw)
        return True


def _distance(share: float, draw: float) -> int:
    """From half to one and a half of the mean: 10 to 30 for a share of 0.05."""
    return max(1, round((0.5 + draw) / share))
