"""Which would-be rejections are let in, to learn how many rejections are wrong."""

from typing import Final

from controlplane.core.turns import UnevenTurns

MAX_DENSER: Final = 3
"""Doublings of the share while probe after probe keeps its SLO."""


class ProbeTurns(UnevenTurns):
    """While probe after probe keeps its SLO, there are more of them: rejections are wrong, and only
    probes can show it."""

    __slots__ = ("_denser",)

    def __init__(self) -> None:
        super().__init__()
        self._denser = 0

    def is_due(self, share: float, draw: float) -> bool:
        """Called once for each would-be rejection; `draw`: uniform in [0, 1)."""
        return super().is_due(share * 2**self._denser, draw)

    def ended(self, *, met: bool) -> None:
        """One that was let in has kept its SLO, or has not."""
        self._denser = min(MAX_DENSER, self._denser + 1) if met else 0
