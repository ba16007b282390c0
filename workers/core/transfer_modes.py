"""Push or pull: how a prefill node's blocks get to the decode node of the same request (R26). Pure.

Both are judged by what a request has to wait for: the seconds from the moment when the decode leg
asks for its blocks until the last of them is there, per byte that travelled. A pull begins then; a
push began while prefill was still computing, and has only its end left to do. What was measured
fades back to the prior, so that the other way is tried again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from workers.core.transfer_choice import Cost
from workers.core.transfer_policy import Mode

MAX_PEERS: Final = 1024
LOCATE_SECONDS: Final = 0.002
"""Before a pull moves its first byte: two round trips between agents, and their queues."""
LEFT_SHARE: Final = 0.25
"""Of a prompt's bytes that a push still has to move when prefill ends: its last chunk's."""
SET: Final = "set for this pair"
_WEIGHT: Final = 0.2
_HALF_LIFE_SECONDS: Final = 300.0
_FAILURE_SECONDS: Final = 1.0


class ModeStats(msgspec.Struct, frozen=True):
    """How blocks of one source come to this node. Seconds are for the last request's bytes."""

    source: str
    mode: Mode
    why: str
    num_bytes: int
    pull_seconds: float
    push_seconds: float
    pulled_total: int = 0  # requests
    pushed_total: int = 0
    failed_pushes_total: int = 0


class Choice(msgspec.Struct, frozen=True):
    """A decision and what it was made from."""

    mode: Mode
    why: str
    num_bytes: int
    pull_seconds: float
    push_seconds: float


@dataclass(slots=True)
class _Measured:
    """Seconds per byte, by mode, and when."""

    rates: dict[Mode, tuple[float, float]] = field(default_factory=dict)
    counts: dict[Mode, int] = field(default_factory=lambda: {"pull": 0, "push": 0})
    failed_at: float = -1e9
    failures: float = 0.0
    failed_pushes: int = 0
    last: Choice | None = None
    used_at: float = 0.0


class ModeCosts:
    """Of every source. Not thread-safe."""

    def __init__(self) -> None:
        self._sources: dict[str, _Measured] = {}

    def observe(self, source: str, mode: Mode, num_bytes: int, seconds: float, now: float) -> None:
        """A request waited so long for so many bytes that came in this mode."""
        if num_bytes <= 0 or seconds < 0:
            return
        found = self._entry(source, now)
        found.counts[mode] += 1
        rate = seconds / num_bytes
        known = found.rates.get(mode)
        if known is not None:
            rate = known[0] + _WEIGHT * (rate - known[0])
        found.rates[mode] = (rate, now)
        if mode == "push":
            found.failures = 0.0

    def push_failed(self, source: str, now: float) -> None:
        """Pulling is preferred for a while."""
        found = self._entry(source, now)
        found.failed_pushes += 1
        found.failures = min(found.failures + 1.0, 16.0)
        found.failed_at = now

    def choose(
        self,
        source: str,
        num_bytes: int,
        links: tuple[Cost, Cost],
        now: float,
        forced: Mode | None = None,
    ) -> Choice:
        """`links`: the cheapest paths that a pull and a push would take. `forced` is remembered, and
        wins."""
        pull_link, push_link = links
        found = self._entry(source, now)
        pull = LOCATE_SECONDS + pull_link.seconds(num_bytes)
        push = push_link.seconds(int(num_bytes * LEFT_SHARE))
        pull = _faded(found, "pull", num_bytes, pull, now)
        push = _faded(found, "push", num_bytes, push, now)
        push += found.failures * _FAILURE_SECONDS * 0.5 ** ((now - found.failed_at) / 30.0)
        mode: Mode = forced or ("push" if push < pull else "pull")
        why = SET if forced else (
            f"a request waits {pull * 1000:.3g} ms for a pull of {num_bytes} bytes, "
            f"{push * 1000:.3g} ms for a push"
        )  # fmt: skip
        found.last = Choice(mode, why, num_bytes, pull, push)
        return found.last

    def report(self, forced: Callable[[str], Mode | None] = lambda source: None) -> list[ModeStats]:
        """By source, of those for which there was anything to choose. `forced` is what is set by now:
        a source that is told to wait for pulls asks no more."""
        return [
            ModeStats(
                source, *_as_set(found.last, forced(source)), found.last.num_bytes,
                found.last.pull_seconds, found.last.push_seconds,
                found.counts["pull"], found.counts["push"], found.failed_pushes,
            )
            for source, found in sorted(self._sources.items())
            if found.last is not None
        ]  # fmt: skip

    def _entry(self, source: str, now: float) -> _Measured:
        found = self._sources.get(source)
        if found is None:
            if len(self._sources) >= MAX_PEERS:
                oldest = min(self._sources, key=lambda name: self._sources[name].used_at)
                del self._sources[oldest]
            found = self._sources[source] = _Measured()
        found.used_at = now
        return found


def _as_set(last: Choice, forced: Mode | None) -> tuple[Mode, str]:
    return (last.mode, last.why) if forced is None else (forced, SET)


def _faded(found: _Measured, mode: Mode, num_bytes: int, prior: float, now: float) -> float:
    known = found.rates.get(mode)
    if known is None:
        return prior
    rate, at = known
    weight: float = 0.5 ** ((now - at) / _HALF_LIFE_SECONDS)
    return prior + weight * (rate * num_bytes - prior)
