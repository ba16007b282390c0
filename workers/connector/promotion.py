"""When is it worth waiting for blocks that lie on SSD? Pure: time is an argument.

A promotion pays only against the recompute that it saves, and both depend on the machine. So both
are measured while they happen, and a promotion that would take longer than the recompute is not
waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.8  # of what was known, at each new measurement
_STALE_SECONDS = 30.0


@dataclass(slots=True)
class Rate:
    """Seconds a unit, a decayed mean in which a large measurement counts more than a small one."""

    units: float = 0.0
    seconds: float = 0.0
    measured_at: float | None = None

    def add(self, units: float, seconds: float, now: float) -> None:
        if units <= 0 or seconds < 0:
            return
        self.units = _DECAY * self.units + units
        self.seconds = _DECAY * self.seconds + seconds
        self.measured_at = now

    def of(self, units: float) -> float | None:
        """Seconds that this many would take; None before the first measurement."""
        return units * self.seconds / self.units if self.units else None


class PromotionJudge:
    """Compares the two. Before anything is known it says yes: that is how it learns."""

    def __init__(self, bound_seconds: float) -> None:
        """`bound_seconds` is the longest wait for one promotion, whatever it saves."""
        self._bound = bound_seconds
        self._promotion = Rate()  # a block
        self._compute = Rate()  # a token

    def note_step(self, num_tokens: int, seconds: float, now: float) -> None:
        """The engine computed so many tokens in one step."""
        self._compute.add(num_tokens, seconds, now)

    def note_promotion(self, num_blocks: int, seconds: float, now: float) -> None:
        """So many blocks came from SSD, or did not come in this time."""
        self._promotion.add(num_blocks, seconds, now)

    def pays(self, num_blocks: int, num_tokens: int, now: float) -> bool:
        """Is it quicker to promote these blocks than to compute their tokens?

        A bad measurement that is old is put to the test again, so that one slow moment of the
        disk does not end promotion for good.
        """
        promotion, recompute = self._promotion.of(num_blocks), self._compute.of(num_tokens)
        if promotion is None or recompute is None or promotion < recompute:
            return True
        measured = self._promotion.measured_at
        return measured is None or now - measured > _STALE_SECONDS

    def patience(self, num_tokens: int) -> float:
        """How long to wait for a promotion that saves computing these tokens."""
        recompute = self._compute.of(num_tokens)
        return self._bound if recompute is None else min(self._bound, recompute)


@dataclass(slots=True)
class Promotion:
    """One request's promotion under way, of `num_blocks` from index `first` of its chain."""

    began: float
    first: int
    num_blocks: int
    patience: float
    last_seen: float  # when it was last seen to be incomplete

    def seconds(self, now: float) -> float:
        """It ended between the last look and now: halfway is the best guess."""
        return self.last_seen - self.began + (now - self.last_seen) / 2
