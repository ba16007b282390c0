"""How far gateways agree on placement: the same prompt, asked of two at the same moment.

Two agree on a request where the second would choose the worker that the first one does, or one of
which the first predicts a first token not later than its own choice's by more than the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

BOUND_SECONDS: Final = 0.050
BOUND_SHARE: Final = 0.10
"""The bound: 50 ms or a tenth of the predicted TTFT, whichever is more."""


@dataclass(slots=True)
class Agreement:
    """Counted over pairs. `excess`: seconds that the other's choice costs more, below 0 taken as 0."""

    asked: int = 0
    same: int = 0
    within: int = 0
    excess: list[float] = field(default_factory=list)

    def count(self, ordered: Sequence[tuple[str, float]], other_choice: str) -> None:
        """`ordered`: one gateway's candidates with predicted TTFTs, its choice first."""
        chosen, best = ordered[0]
        predicted = dict(ordered).get(other_choice)
        self.asked += 1
        if predicted is None:  # a worker that this one may not choose
            self.excess.append(float("inf"))
            return
        over = max(0.0, predicted - best)
        self.same += other_choice == chosen
        self.within += over <= max(BOUND_SECONDS, BOUND_SHARE * best)
        self.excess.append(over)

    def summary(self) -> dict[str, float]:
        """Shares of what was asked, and the 95th percentile of the excess in seconds."""
        asked = max(1, self.asked)
        ordered = sorted(self.excess)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else 0.0
        return {
            "asked": self.asked,
            "same_share": self.same / asked,
            "within_bound_share": self.within / asked,
            "excess_p95_seconds": p95,
        }
