"""LIVE is proven: the age of the newest sample drawn decides what the header says."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from console.viewmodel.numbers import UNKNOWN, age

FRESH_SECONDS = 2.0
STALE_SECONDS = 10.0

Mark = Literal["connecting", "live", "late", "stale", "held"]


@dataclass(frozen=True, slots=True)
class Freshness:
    """`mark` decides: live and late draw normally, stale dims values and drops totals."""

    mark: Mark
    age_seconds: float | None
    retry_seconds: float | None = None
    held_at: float | None = None  # seconds since the epoch

    @property
    def is_stale(self) -> bool:
        """Values shown are old enough to mislead."""
        return self.mark == "stale"

    @property
    def age_text(self) -> str:
        """`age 0.4 s`, `age 3.1 s!`."""
        return f"age {age(self.age_seconds)}{'!' if self.mark == 'late' else ''}"

    @property
    def stale_text(self) -> str:
        """`STALE 14 s, retry in 2 s`; `STALE 14 s, trying now`."""
        return f"STALE {age(self.age_seconds)}{self.retry_text}"

    @property
    def retry_text(self) -> str:
        """`, retry in 2 s`, `, trying now` while a try has not failed yet, or nothing."""
        if self.retry_seconds is None:
            return ""
        seconds = ceil(self.retry_seconds)
        return f", retry in {seconds} s" if seconds > 0 else ", trying now"


def freshness(
    *,
    now: float,
    received: float | None,
    sample_age: float | None = None,
    retry_at: float | None = None,
    held_at: float | None = None,
    connected: bool = True,
) -> Freshness:
    """`now`, `received`, `retry_at` on one monotonic clock; `sample_age` as the server gave it.
    Without a connection nothing new can come: then what is no longer fresh is stale."""
    retry = None if retry_at is None else retry_at - now
    if received is None:
        return Freshness("connecting", None, retry)
    seconds = max(0.0, now - received) + max(0.0, sample_age or 0.0)
    if held_at is not None:
        return Freshness("held", seconds, retry, held_at)
    if seconds >= (STALE_SECONDS if connected else FRESH_SECONDS):
        return Freshness("stale", seconds, retry)
    return Freshness("live" if seconds < FRESH_SECONDS else "late", seconds, retry)


def is_old(seconds: float | None) -> bool:
    """A row's own age: unknown counts as old."""
    return seconds is None or seconds >= STALE_SECONDS


def marked(text: str, *, old: bool) -> str:
    """An old number carries `~`, so that it is told apart without colour."""
    return f"~{text}" if old and not text.startswith(UNKNOWN) else text
