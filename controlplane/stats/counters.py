"""Cumulative counters become increments. Pure; time is an argument.

A restart (another epoch, or a value that fell) is a gap with a mark, never a negative rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FRESH_SECONDS = 10.0
"""A source that started less than this ago, and was never seen, counts from zero."""


@dataclass(frozen=True, slots=True)
class Step:
    """What changed since the last sample; `increments` is None where that is unknown."""

    increments: dict[str, float] | None
    reset: bool = False


@dataclass(slots=True)
class CounterTracker:
    """Counters of one source. `epoch` names its current life (incarnation, start time)."""

    epoch: float | None = None
    last: dict[str, float] = field(default_factory=dict)
    _excess_hits: float = 0.0

    def step(self, epoch: float, started_at: float, values: dict[str, float], at: float) -> Step:
        """Take a sample. `started_at` and `at`: seconds since the epoch."""
        first, fell = self.epoch is None, self._fell(values)
        restarted = not first and (epoch != self.epoch or fell)
        before = self.last
        self.epoch, self.last = epoch, values
        if restarted:
            self._excess_hits = 0.0
            return Step(None, reset=True)
        if first and at - started_at > FRESH_SECONDS:
            return Step(None)
        increments = {name: value - before.get(name, 0.0) for name, value in values.items()}
        return Step(self._possible(increments))

    def _fell(self, values: dict[str, float]) -> bool:
        return any(values.get(name, 0.0) < value for name, value in self.last.items())

    def _possible(self, increments: dict[str, float]) -> dict[str, float]:
        """0 <= hits <= requested in every bucket: what is too much waits for its prompt tokens."""
        if "hit_tokens" in increments:
            hits = increments["hit_tokens"] + self._excess_hits
            increments["hit_tokens"] = min(hits, increments.get("prompt_tokens", 0.0))
            self._excess_hits = hits - increments["hit_tokens"]
        return increments


@dataclass(slots=True)
class HistogramTracker:
    """Cumulative histograms of one source, on the same terms."""

    last: dict[str, list[int]] = field(default_factory=dict)

    def step(self, counts: dict[str, list[int]], step: Step) -> dict[str, list[int]]:
        """Increments that go with the counters' `step`; empty where those are unknown."""
        before, self.last = self.last, counts
        if step.increments is None:
            return {}
        changed: dict[str, list[int]] = {}
        for name, now in counts.items():
            old = before.get(name) or [0] * len(now)
            changed[name] = [max(0, b - a) for a, b in zip(old, now, strict=True)]
        return changed
