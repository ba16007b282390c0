"""Prefill legs in flight on one worker: this gateway's, and what other gateways tell of theirs.

Workers compute prompts one after the other, so a new leg waits for all of them, and what a leg took
by itself is the time since the one before it ended, whose ever that was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

STALE_SECONDS: Final = 2.0
"""What another gateway told counts for so long; a load that lasts is told again before."""


class QueueShare(msgspec.Struct, frozen=True, gc=False):
    """One gateway's legs at the worker, as of when it was told. `head`: the oldest of them; `ended`
    counts since the gateway's start. Predicted seconds, of all legs and of the head."""

    legs: int = 0
    seconds: float = 0.0
    head_seconds: float = 0.0
    head_age: float = 0.0
    ended: int = 0
    ended_age: float = 0.0


class _Queued(msgspec.Struct):
    predicted_seconds: float
    started_at: float
    tokens: int


class _Other(msgspec.Struct):
    share: QueueShare
    told_at: float


@dataclass(slots=True)
class PrefillQueue:
    """Of one worker. Ids of gateways are the caller's; they are few."""

    _legs: dict[str, _Queued] = field(default_factory=dict)
    _last_end: float = 0.0
    _own_end: float = 0.0
    _predicted: float = 0.0  # sum over the legs
    tokens: int = 0
    ended: int = 0
    is_vague: bool = False
    """Of the leg that ended last: nobody knows when its own time began."""
    is_hearsay: bool = False
    """Of the same: its time began when another gateway's leg ended, as that told."""
    _end_was_told: bool = False
    _others: dict[str, _Other] = field(default_factory=dict)

    def __len__(self) -> int:
        """This gateway's alone."""
        return len(self._legs)

    def __contains__(self, leg: str) -> bool:
        return leg in self._legs

    @property
    def num_legs(self) -> int:
        """Of all gateways."""
        others = self._others
        return len(self._legs) + sum(other.share.legs for other in others.values())

    def start(self, leg: str, predicted_seconds: float, tokens: int, now: float) -> None:
        self._legs[leg] = _Queued(predicted_seconds, now, tokens)
        self._predicted += predicted_seconds
        self.tokens += tokens

    def end(self, leg: str, now: float) -> float:
        """Service seconds of the leg: what it took without waiting for those before it."""
        queued = self._legs.pop(leg)
        self.tokens -= queued.tokens
        # Sums of floats drift: begun anew whenever nothing is left.
        self._predicted = self._predicted - queued.predicted_seconds if self._legs else 0.0
        self.is_vague = bool(self._others) and self._is_behind_another(queued.started_at, now)
        self.is_hearsay = self._end_was_told and self._last_end > queued.started_at
        service = now - max(queued.started_at, self._last_end)
        self._last_end = self._own_end = now
        self._end_was_told = False
        self.ended += 1
        return max(0.0, service)

    def wait_seconds(self, now: float) -> float:
        """Predicted wait of one more leg: what all have left, the head's progress taken off."""
        if self._others:
            return self._wait_behind_all(now)
        if not self._legs:
            return 0.0
        head = next(iter(self._legs.values()))
        progress = min(now - max(head.started_at, self._last_end), head.predicted_seconds)
        return max(0.0, self._predicted - max(0.0, progress))

    # --- several gateways ---

    @property
    def is_shared(self) -> bool:
        """Whether another gateway has had legs here lately."""
        return bool(self._others)

    def share(self, now: float) -> QueueShare:
        """This gateway's part, for the others."""
        head = next(iter(self._legs.values()), None)
        age, seconds = (
            (0.0, 0.0) if head is None else (now - head.started_at, head.predicted_seconds)
        )
        ended_age = now - self._own_end if self.ended else 0.0
        return QueueShare(len(self._legs), self._predicted, seconds, age, self.ended, ended_age)

    def take(self, gateway: str, share: QueueShare, now: float) -> None:
        """Another gateway's part, told just now; it replaces what that one told before."""
        before = self._others.get(gateway)
        end = now - share.ended_age
        if before is not None and share.ended > before.share.ended and end > self._last_end:
            self._last_end, self._end_was_told = end, True
        self._others[gateway] = _Other(share, now)

    def idle(self, gateway: str) -> None:
        """Another gateway has nothing here as of now. Idempotent."""
        before = self._others.get(gateway)
        if before is not None and before.share.legs:
            before.share = QueueShare(ended=before.share.ended)

    def forget(self, gateway: str) -> None:
        """It has left. Idempotent."""
        self._others.pop(gateway, None)

    def expire(self, now: float) -> None:
        """Forget what is too old to count."""
        for gateway in [g for g, o in self._others.items() if now - o.told_at > STALE_SECONDS]:
            del self._others[gateway]

    def _is_behind_another(self, started_at: float, now: float) -> bool:
        """Whether another gateway's leg went before one that has ended now, as far as is known: it
        has ended, too, and that was not told yet."""
        return any(
            other.share.legs
            and other.told_at - other.share.head_age < started_at
            and now - other.told_at <= STALE_SECONDS
            for other in self._others.values()
        )

    def _wait_behind_all(self, now: float) -> float:
        total, head = self._predicted, next(iter(self._legs.values()), None)
        began, most = (now, 0.0) if head is None else (head.started_at, head.predicted_seconds)
        for other in self._others.values():
            share = other.share
            if not share.legs or now - other.told_at > STALE_SECONDS:
                continue
            total += share.seconds
            started = other.told_at - share.head_age
            if started < began:
                began, most = started, share.head_seconds
        progress = min(now - max(began, self._last_end), most)
        return max(0.0, total - max(0.0, progress))
