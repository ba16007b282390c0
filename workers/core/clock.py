"""Time as an argument: shells hold a `Clock`, cores are handed numbers."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Both in seconds; neither call blocks."""

    def monotonic(self) -> float:
        """For durations and deadlines; never goes back."""
        ...

    def wall(self) -> float:
        """Since the epoch, UTC."""
        ...


class ManualClock:
    """A clock that tests and simulations turn by hand."""

    def __init__(self, start: float = 1000.0, epoch: float = 1_700_000_000.0) -> None:
        self._elapsed = 0.0
        self._start = start
        self._epoch = epoch

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._elapsed += seconds

    def monotonic(self) -> float:
        return self._start + self._elapsed

    def wall(self) -> float:
        return self._epoch + self._elapsed
