"""How far predictions were off lately: quantiles of measured over predicted.

An error grows with what is predicted, and has a floor: the ratio is taken of both plus a constant.
Old samples go by number and by age, so that a spell of bad predictions is forgotten even where
its own verdicts keep new samples away.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Final

MAX_SAMPLES: Final = 256
MIN_SAMPLES: Final = 20
MAX_AGE_SECONDS: Final = 300.0
FLOOR_SECONDS: Final = 0.05
LEVEL_STEP: Final = 0.05
LEAST_MISSES, MOST_MISSES = 0.005, 0.5
PROBE_STEP: Final = 0.1
MAX_RATIO: Final = 20.0


@dataclass(slots=True)
class ErrorWindow:
    """Ratios (measured + floor) / (predicted + floor) of the last samples."""

    floor_seconds: float = FLOOR_SECONDS
    _samples: deque[tuple[float, float]] = field(default_factory=deque)  # (at, ratio)
    _ordered: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._samples)

    def observe(self, predicted_seconds: float, measured_seconds: float, now: float) -> None:
        floor = self.floor_seconds
        ratio = min(MAX_RATIO, (measured_seconds + floor) / (max(0.0, predicted_seconds) + floor))
        self._samples.append((now, ratio))
        insort(self._ordered, ratio)
        if len(self._samples) > MAX_SAMPLES:
            self._drop()

    def quantile(self, predicted_seconds: float, percentile: float, now: float) -> float:
        """Seconds that `percentile` per cent of such requests keep; the prediction itself while
        there are fewer than `MIN_SAMPLES` samples."""
        while self._samples and now - self._samples[0][0] > MAX_AGE_SECONDS:
            self._drop()
        count = len(self._ordered)
        if count < MIN_SAMPLES:
            return predicted_seconds
        place = percentile / 100 * (count - 1)
        below = int(place)
        low = self._ordered[below]
        high = self._ordered[min(below + 1, count - 1)]
        ratio = low + (place - below) * (high - low)
        return max(0.0, ratio * (predicted_seconds + self.floor_seconds) - self.floor_seconds)

    def check_integrity(self) -> None:
        assert len(self._samples) == len(self._ordered) <= MAX_SAMPLES
        assert self._ordered == sorted(ratio for _, ratio in self._samples)

    def _drop(self) -> None:
        _, ratio = self._samples.popleft()
        del self._ordered[bisect_left(self._ordered, ratio)]


@dataclass(slots=True)
class Level:
    """Which quantile of the errors to go by, so that `percentile` per cent of those let in keep
    their bound: higher after a miss, lower after a promise kept, never below the median (adaptive
    conformal inference, Gibbs and Candes, 2021). Where errors are small or bounds are far, that
    is the median, and nobody is turned away for a risk that is not there."""

    percentile: float
    _misses: float = field(init=False)  # share of misses that is allowed for

    def __post_init__(self) -> None:
        self._misses = self._target

    @property
    def quantile(self) -> float:
        """In per cent."""
        return 100 * (1 - self._misses)

    def observe(self, *, kept: bool) -> None:
        """One that was let in has ended."""
        moved = self._misses + LEVEL_STEP * (self._target - (not kept))
        self._misses = min(MOST_MISSES, max(LEAST_MISSES, moved))

    def false_reject(self) -> None:
        """One that was let in against the prediction kept its bound. Where nearly all are turned
        away few others are left to learn from: without this, bad predictions would keep the very
        requests out that show them to be bad."""
        self._misses = min(MOST_MISSES, self._misses + PROBE_STEP)

    @property
    def _target(self) -> float:
        return min(MOST_MISSES, 1 - self.percentile / 100)
