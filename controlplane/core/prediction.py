"""Times fitted online on what this cluster measured: prefill seconds, TBT, handover.

A worker's first predictions come from its model's geometry (`prior_of`) or from what its peers have
shown; the prior fades as samples come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, Protocol

import msgspec

from controlplane.core.fitting import Average, Calibration, LinearFit, relative_weight
from controlplane.core.handover import HandoverModel
from workers.core.disaggregation import ATTENTION, Geometry

TBT_PRIOR: Final = (0.020, 0.001, 0.0)
"""Seconds; seconds per running request; seconds per 1000 tokens of KV in use."""
ASSUMED_FLOPS: Final = 2e14
"""Of a worker whose speed nobody has measured or said. Rather too fast than too slow: a prior must
not reject requests."""
_LOAD_BYTES_PER_SECOND: Final = 1e10  # of cached KV into the engine, before it was measured
_OVERHEAD_SECONDS: Final = 0.010
_LEAST_SECONDS: Final = 1e-3
_PRIOR_SAMPLES: Final = 1e-3
_SHORTEST_SHARE: Final = 0.5
MOST_REFUSED: Final = 8
"""In a row: a fit far too high would refuse all that could mend it."""
MOST_SECONDS: Final = 86_400.0
"""What is said to have taken longer, or no number at all, teaches nothing."""
_FEW: Final = 3
"""Samples after which a fit is believed on its own."""


class Predictor(Protocol):
    """Seconds of a prefill, by the tokens it computes and the cached ones before them.

    `predict` is pure, never negative, and never falls with more computed tokens. `observe` takes
    what one leg needed without waiting behind others. Neither blocks; both are of one thread.
    """

    @property
    def num_samples(self) -> int: ...
    def predict(self, uncached_tokens: int, cached_tokens: int) -> float: ...
    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float) -> None: ...


PrefillSample = tuple[int, int, float]
"""Computed tokens, cached tokens, seconds."""
BATCH_SECONDS: Final = 0.030
BATCH_SHARE: Final = 0.25
"""Legs that end so soon after another's, and in so much less a token, were computed with it."""


class PrefillPrior(msgspec.Struct, frozen=True):
    """Seconds; seconds per 1000 computed and per 1000 cached tokens; seconds per million pairs of
    a computed token and one that it attends to (twice: u^2 + 2uc for u computed after c cached)."""

    base: float = 0.020
    per_computed: float = 0.5
    per_cached: float = 0.010
    per_attended: float = 0.008


def prior_of(geometry: Geometry, flops: float = ASSUMED_FLOPS) -> PrefillPrior:
    """From the operations that a prefill needs at `flops` a second: as `Geometry.flops`, but what a
    causal mask leaves of attention, half of it, is all that engines compute."""
    linear = 2 * geometry.layers * geometry.weights * 1000 / flops
    attention = ATTENTION / 2 * geometry.layers * geometry.hidden * 1e6 / flops
    loading = geometry.kv_bytes_per_token * 1000 / _LOAD_BYTES_PER_SECOND
    return PrefillPrior(_OVERHEAD_SECONDS, linear, loading, attention)


class PrefillModel:
    """Seconds that one worker needs for a prompt; the library's `Predictor`.

    seconds = base + a u + b c + q (u^2 + 2 u c), u computed after c cached tokens: q is attention,
    a the weights, b the loading of what is cached. Errors are weighed relative to the time.
    """

    def __init__(self, prior: PrefillPrior | None = None) -> None:
        self._start(prior or PrefillPrior())
        self.calibration = Calibration()
        self._refused_in_a_row = 0

    def _start(self, prior: PrefillPrior) -> None:
        values = (prior.base, prior.per_computed, prior.per_cached, prior.per_attended)
        self._prior = prior
        self._fit = LinearFit(values, _precision(values), non_negative=True)

    @property
    def num_samples(self) -> int:
        return self._fit.num_samples

    @property
    def fitted(self) -> PrefillPrior:
        """What it has learned, as a prior for a worker that is new."""
        return PrefillPrior(*self._fit.theta)

    def begin_with(self, prior: PrefillPrior) -> None:
        """Another prior, as long as nothing was learned."""
        if not self.num_samples and prior != self._prior:
            self._start(prior)

    def predict(self, uncached_tokens: int, cached_tokens: int) -> float:
        """Never below zero, never falling with more computed tokens."""
        base, per_computed, per_cached, per_attended = self._fit.theta
        u, c = uncached_tokens / 1000, cached_tokens / 1000
        return base + per_computed * u + per_cached * c + per_attended * u * (u + 2 * c)

    def refuses(self, uncached_tokens: int, cached_tokens: int, seconds: float) -> bool:
        """Of a leg whose beginning is known by hearsay: so much less than it should take that the
        news of the leg before it came late. Where nearly all are such, the prediction is wrong."""
        least = _SHORTEST_SHARE * self.predict(uncached_tokens, cached_tokens)
        if not self.num_samples or seconds >= least:
            self._refused_in_a_row = 0
            return False
        self._refused_in_a_row += 1
        return self._refused_in_a_row <= MOST_REFUSED

    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float) -> None:
        """One finished prefill, without the time it waited behind others."""
        if not 0 <= seconds < MOST_SECONDS or min(uncached_tokens, cached_tokens) < 0:
            return
        predicted = self.predict(uncached_tokens, cached_tokens)
        if self.num_samples:
            self.calibration.observe(predicted, seconds)
        elif predicted > 0:  # the geometry knows the shape, this one how fast
            self._start(_scaled(self._prior, max(seconds, _LEAST_SECONDS) / predicted))
        u, c = uncached_tokens / 1000, cached_tokens / 1000
        weight = relative_weight(seconds, self.predict(uncached_tokens, cached_tokens))
        # Long prompts are few, and they alone show what attention costs.
        kind = (uncached_tokens + cached_tokens).bit_length() // 2
        self._fit.observe((1.0, u, c, u * (u + 2 * c)), seconds, weight, kind)


def join_batches(samples: Iterable[PrefillSample]) -> list[PrefillSample]:
    """Engines compute several prompts in one step, whose legs end together: the first of them seems
    to have taken all the time and the others none. Such are one sample with the one before."""
    joined: list[PrefillSample] = []
    for uncached, cached, seconds in samples:
        if joined and seconds < BATCH_SECONDS:
            before = joined[-1]
            usual = before[2] * uncached / max(1, before[0])
            if seconds < BATCH_SHARE * usual:
                joined[-1] = (before[0] + uncached, before[1] + cached, before[2] + seconds)
                continue
        joined.append((uncached, cached, seconds))
    return joined


def _scaled(prior: PrefillPrior, factor: float) -> PrefillPrior:
    return PrefillPrior(
        prior.base * factor,
        prior.per_computed * factor,
        prior.per_cached * factor,
        prior.per_attended * factor,
    )


def _precision(values: tuple[float, ...]) -> tuple[float, ...]:
    """Samples are weighed by 1 / seconds: a coefficient off by itself counts `_PRIOR_SAMPLES`."""
    least = max(1e-3 * max(values), 1e-9)
    return tuple(_PRIOR_SAMPLES / max(value, least) ** 2 for value in values)


def share_priors(models: Collection[PrefillModel]) -> None:
    """Workers of one model on alike hosts: one that has shown nothing is taken for the others'
    median, until its own samples come."""
    new = [model for model in models if not model.num_samples]
    if not new:
        return
    known = [model.fitted for model in models if model.num_samples]
    if known:
        known.sort(key=lambda prior: prior.per_computed)
        for model in new:
            model.begin_with(known[len(known) // 2])


class DecodeModel:
    """TBT of one worker over its running requests and their KV tokens, and the time from leg 2 to
    its first byte."""

    def __init__(self) -> None:
        self._tbt = LinearFit(TBT_PRIOR, non_negative=True)
        self.handover = HandoverModel()
        self._service = Average()
        self.calibration = Calibration()

    @property
    def num_samples(self) -> int:
        return self._tbt.num_samples

    def predict_tbt(self, running: int, tokens: int = 0) -> float:
        """Seconds between tokens with `running` requests of `tokens` KV tokens in all."""
        base, per_running, per_tokens = self._tbt.theta
        return base + per_running * running + per_tokens * tokens / 1000

    def observe_tbt(self, running: int, seconds: float, tokens: int = 0) -> None:
        if not 0 <= seconds < MOST_SECONDS or min(running, tokens) < 0:
            return
        if self.num_samples:
            self.calibration.observe(self.predict_tbt(running, tokens), seconds)
        weight = relative_weight(seconds, self.predict_tbt(running, tokens))
        self._tbt.observe((1.0, float(running), tokens / 1000), seconds, weight)

    def predict_service(self) -> float | None:
        """Seconds that a request holds its decode slot."""
        return self._service.value

    def observe_service(self, seconds: float) -> None:
        self._service.observe(seconds)


class TransferModel:
    """Seconds to bring tokens from one node to another, by what such legs took beyond computing."""

    def __init__(self, base_seconds: float, seconds_per_token: float) -> None:
        self._fit = LinearFit((base_seconds, seconds_per_token * 1000), non_negative=True)
        self.calibration = Calibration()

    @property
    def num_samples(self) -> int:
        return self._fit.num_samples

    @property
    def is_fitted(self) -> bool:
        return self.num_samples >= _FEW

    @property
    def base_seconds(self) -> float:
        return self._fit.theta[0]

    @property
    def seconds_per_token(self) -> float:
        return self._fit.theta[1] / 1000

    def predict(self, tokens: int) -> float:
        return self.base_seconds + self.seconds_per_token * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """One leg's `tokens` from there."""
        if tokens <= 0 or not 0 <= seconds < MOST_SECONDS:
            return
        if self.num_samples:
            self.calibration.observe(self.predict(tokens), seconds)
        weight = relative_weight(seconds, self.predict(tokens))
        self._fit.observe((1.0, tokens / 1000), seconds, weight)
