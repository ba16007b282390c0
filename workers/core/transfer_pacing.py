"""How fast and how often: token buckets, backoff, breaker. Time and jitter are arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

CAP_SHARE: Final = 0.4
"""Of a link's measured bandwidth, where collectives share it (R23)."""
_BURST_SECONDS: Final = 0.02


@dataclass(slots=True)
class TokenBucket:
    """At most `rate` bytes a second, after a burst. Rate 0: no limit.

    An op may overdraw it once: what is larger than the burst still moves, and is paid for after.
    """

    rate: float = 0.0
    _tokens: float = 0.0
    _at: float = 0.0

    def set_rate(self, rate: float, now: float) -> None:
        assert rate >= 0
        if rate == self.rate:
            return
        self.rate, self._tokens, self._at = rate, 0.0, now

    def ready(self, now: float) -> bool:
        """May the next op go?"""
        if not self.rate:
            return True
        self._refill(now)
        return self._tokens >= 0

    def take(self, num_bytes: int) -> None:
        if self.rate:
            self._tokens -= num_bytes

    def ready_at(self, now: float) -> float:
        """When `ready` will be true."""
        if self.ready(now):
            return now
        return now - self._tokens / self.rate + 1e-6

    def _refill(self, now: float) -> None:
        burst = self.rate * _BURST_SECONDS
        self._tokens = min(burst, self._tokens + (now - self._at) * self.rate)
        self._at = now


@dataclass(slots=True)
class RetryBudget:
    """Bytes that may be sent again: a floor, and a share of what arrived, so that a lossy link
    does not carry mostly retries (R25). The floor comes back within a minute."""

    floor_bytes: int
    share: float
    spent_bytes: int = 0
    exhausted: int = 0
    _tokens: float = field(default=0.0)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._tokens = float(self.floor_bytes)

    def arrived(self, num_bytes: int) -> None:
        self._tokens = min(2.0 * self.floor_bytes, self._tokens + num_bytes * self.share)

    def spend(self, num_bytes: int, now: float) -> bool:
        """False: it is used up, and the piece is to be given up instead."""
        if self._tokens < self.floor_bytes:
            regained = (now - self._at) * self.floor_bytes / 60.0
            self._tokens = min(float(self.floor_bytes), self._tokens + max(0.0, regained))
        self._at = now
        if self._tokens < num_bytes:
            self.exhausted += 1
            return False
        self._tokens -= num_bytes
        self.spent_bytes += num_bytes
        return True


def backoff_seconds(failures: int, base: float, cap: float, jitter: float) -> float:
    """Doubles with each failure up to `cap`; `jitter` in [0, 1) spreads it over half to whole."""
    full = min(cap, base * 2.0 ** min(max(failures - 1, 0), 30))
    return full * (0.5 + 0.5 * jitter)


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"  # nothing is tried
    HALF_OPEN = "half_open"  # one try decides


@dataclass(slots=True)
class Breaker:
    """Stops trying a peer that fails in a row. Raises one alarm until it works again."""

    threshold: int
    base_seconds: float
    cap_seconds: float
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    retry_at: float = 0.0
    alarmed: bool = False

    def failed(self, now: float, jitter: float) -> bool:
        """Count a failure; True where the alarm is to be raised now."""
        self.failures += 1
        base = self.base_seconds
        if self.failures >= self.threshold:
            self.state = BreakerState.OPEN
            base = max(base, 1.0)
        count = self.failures - (self.threshold - 1 if self.failures >= self.threshold else 0)
        self.retry_at = now + backoff_seconds(count, base, self.cap_seconds, jitter)
        if self.state is BreakerState.OPEN and not self.alarmed:
            self.alarmed = True
            return True
        return False

    def succeeded(self) -> bool:
        """Count a success; True where an alarm is to be taken back."""
        was_alarmed = self.alarmed
        self.state, self.failures, self.alarmed = BreakerState.CLOSED, 0, False
        self.retry_at = 0.0
        return was_alarmed

    def allows(self, now: float) -> bool:
        """Is a new transfer accepted? An open breaker half-opens when its time has come."""
        if self.state is BreakerState.OPEN and now >= self.retry_at:
            self.state = BreakerState.HALF_OPEN
        return self.state is not BreakerState.OPEN
