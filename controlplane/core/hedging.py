"""How many requests may have a second leg 1 beside a late one: a share, so that what is slow for
everybody is not doubled."""

from dataclasses import dataclass, field
from typing import Final

BURST: Final = 4.0
"""Hedges that may follow one another after a time without any."""
MAX_MODELS: Final = 1024


@dataclass(frozen=True, slots=True)
class HedgeRules:
    """`after_seconds` 0: never."""

    after_seconds: float = 0.0
    max_share: float = 0.05  # of the requests that might have been hedged


@dataclass(slots=True)
class HedgeBudget:
    """Of one model: each request brings its share of a hedge, each hedge takes a whole one."""

    saved: float = 0.0

    def came(self, rules: HedgeRules) -> None:
        """One more request that might be hedged."""
        self.saved = min(BURST, self.saved + rules.max_share)

    def take(self) -> bool:
        """Whether one may be hedged now; if so, it counts."""
        if self.saved < 1.0:
            return False
        self.saved -= 1.0
        return True


@dataclass(slots=True)
class Hedges:
    """What all requests share, and what came of it."""

    sent: int = 0
    won: int = 0  # by the second leg
    _budgets: dict[str, HedgeBudget] = field(default_factory=dict)

    def of(self, model: str) -> HedgeBudget:
        budget = self._budgets.get(model)
        if budget is None:
            if len(self._budgets) >= MAX_MODELS:
                self._budgets.clear()
            budget = self._budgets[model] = HedgeBudget()
        return budget
