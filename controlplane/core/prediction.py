"""Times fitted online on what this cluster measured: prefill seconds, TBT, handover.

Recursive least squares with forgetting, a handful of floats a worker. Before the first samples
the prior answers, and it fades as they come.
"""

from dataclasses import dataclass, field
from typing import Final

import msgspec

FORGETTING: Final = 0.98
"""Weight of a sample against the next one: about the last 50 count."""
_MAX_COVARIANCE: Final = 1e6  # forgetting without excitation must not blow up

PREFILL_PRIOR: Final = (0.020, 0.5, 0.010)
"""Seconds; seconds per 1000 computed tokens; seconds per 1000 cached tokens."""
TBT_PRIOR: Final = (0.020, 0.001)
"""Seconds; seconds per running request."""


class LinearFit:
    """y = theta . x, fitted by recursive least squares. Callers scale x to about 1."""

    def __init__(
        self,
        prior: tuple[float, ...],
        prior_variance: float = 100.0,
        forgetting: float = FORGETTING,
    ) -> None:
        self.theta = list(prior)
        self.num_samples = 0
        self._forgetting = forgetting
        size = len(prior)
        self._covariance = [
            [prior_variance if i == j else 0.0 for j in range(size)] for i in range(size)
        ]

    def predict(self, x: tuple[float, ...]) -> float:
        return sum(weight * value for weight, value in zip(self.theta, x, strict=True))

    def observe(self, x: tuple[float, ...], y: float) -> None:
        """Take one sample in."""
        covariance = self._covariance
        projected = [sum(p * value for p, value in zip(row, x, strict=True)) for row in covariance]
        denominator = self._forgetting + sum(
            value * p for value, p in zip(x, projected, strict=True)
        )
        gain = [p / denominator for p in projected]
        error = y - self.predict(x)
        self.theta = [weight + g * error for weight, g in zip(self.theta, gain, strict=True)]
        for i, row in enumerate(covariance):
            for j in range(len(row)):
                value = (row[j] - gain[i] * projected[j]) / self._forgetting
                row[j] = max(-_MAX_COVARIANCE, min(_MAX_COVARIANCE, value))
        self.num_samples += 1


class PrefillModel:
    """Seconds that one worker needs for a prompt, by computed and cached tokens."""

    def __init__(self) -> None:
        self._fit = LinearFit(PREFILL_PRIOR)

    @property
    def num_samples(self) -> int:
        return self._fit.num_samples

    def predict(self, uncached_tokens: int, cached_tokens: int) -> float:
        """Never below zero, never falling with more computed tokens."""
        base, per_uncached, per_cached = self._fit.theta
        seconds = max(base, 0.0) + max(per_uncached, 0.0) * uncached_tokens / 1000
        return seconds + max(per_cached, 0.0) * cached_tokens / 1000

    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float) -> None:
        """One finished prefill, without the time it waited behind others."""
        if seconds >= 0:
            self._fit.observe((1.0, uncached_tokens / 1000, cached_tokens / 1000), seconds)


class DecodeModel:
    """TBT of one worker over its running requests, and the time from leg 2 to its first byte."""

    def __init__(self) -> None:
        self._tbt = LinearFit(TBT_PRIOR)
        self._handover = Average()
        self._service = Average()

    @property
    def num_samples(self) -> int:
        return self._tbt.num_samples

    def predict_tbt(self, running: int) -> float:
        """Seconds between tokens with `running` requests side by side."""
        base, per_running = self._tbt.theta
        return max(0.0, base) + max(0.0, per_running) * running

    def observe_tbt(self, running: int, seconds: float) -> None:
        self._tbt.observe((1.0, float(running)), seconds)

    def predict_handover(self) -> float | None:
        return self._handover.value

    def observe_handover(self, seconds: float) -> None:
        self._handover.observe(seconds)

    def predict_service(self) -> float | None:
        """Seconds that a request holds its decode slot."""
        return self._service.value

    def observe_service(self, seconds: float) -> None:
        self._service.observe(seconds)


@dataclass(slots=True)
class Average:
    """Exponentially forgetting mean; None before the first sample."""

    value: float | None = None
    weight: float = 0.1

    def observe(self, sample: float) -> None:
        old = self.value
        self.value = sample if old is None else old + self.weight * (sample - old)


class _Queued(msgspec.Struct):
    predicted_seconds: float
    started_at: float


@dataclass(slots=True)
class PrefillQueue:
    """Prefill legs in flight on one worker, as this gateway sees them; they run one by one."""

    _legs: dict[str, _Queued] = field(default_factory=dict)
    _last_end: float = 0.0
    tokens: int = 0
    _tokens_of: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._legs)

    def __contains__(self, leg: str) -> bool:
        return leg in self._legs

    def start(self, leg: str, predicted_seconds: float, tokens: int, now: float) -> None:
        self._legs[leg] = _Queued(predicted_seconds, now)
        self._tokens_of[leg] = tokens
        self.tokens += tokens

    def end(self, leg: str, now: float) -> float:
        """Service seconds of the leg: what it took without waiting for those before it."""
        queued = self._legs.pop(leg)
        self.tokens -= self._tokens_of.pop(leg)
        service = now - max(queued.started_at, self._last_end)
        self._last_end = now
        return max(0.0, service)

    def wait_seconds(self, now: float) -> float:
        """Predicted wait of one more leg: what all have left, the head's progress taken off."""
        if not self._legs:
            return 0.0
        head = next(iter(self._legs.values()))
        progress = min(now - max(head.started_at, self._last_end), head.predicted_seconds)
        total = sum(leg.predicted_seconds for leg in self._legs.values())
        return max(0.0, total - max(0.0, progress))
