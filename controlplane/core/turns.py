"""A share of what comes, at uneven distances."""

import math


class UnevenTurns:
    """One in 1/share on average, half to one and a half of that apart, so never one of the first
    few: whoever tries a gateway out with a handful of requests sees what it usually does."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: int | None = None

    def is_due(self, share: float, draw: float) -> bool:
        """Called once for each that comes; `draw`: uniform in [0, 1)."""
        if share <= 0:
            return False
        share = min(1.0, share)
        if self._left is None:
            self._left = _distance(share, draw)
        self._left = min(self._left, math.ceil(1.5 / share)) - 1  # the share may have risen
        if self._left > 0:
            return False
        self._left = _distance(share, draw)
        return True


def _distance(share: float, draw: float) -> int:
    """10 to 30 for a share of 0.05."""
    return max(1, round((0.5 + draw) / share))
