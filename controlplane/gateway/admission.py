"""Admission in this gateway: what predictions are worth, who is let in, and what became of it."""

from random import Random
from typing import Any, Protocol

import msgspec

from controlplane.core.admission import (
    ADMITTED,
    Admission,
    AdmissionRules,
    Gate,
    Predicted,
    Slo,
    Standing,
    admit,
    keeps_slo,
)
from controlplane.core.dispatch_queue import QueueRules
from controlplane.core.error_window import ErrorWindow, Level
from controlplane.core.probes import ProbeTurns
from controlplane.gateway.stats import Stats
from controlplane.gateway.wire import Decision, Verdict

TBT_FLOOR_SECONDS = 0.005
MAX_MODELS = 256
MAX_SLOS = 256  # of one model


class SloAndRules(Protocol):
    """The policies that act on one request."""

    @property
    def slo(self) -> Slo: ...
    @property
    def admission(self) -> AdmissionRules: ...


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """What `ended` compares: from the turn to the first token, and TBT."""

    rest_seconds: float | None
    tbt_seconds: float | None


class _Errors:
    """How far predictions for one model were off: the wait for a turn by priority class, the rest
    of TTFT from the turn on, and TBT; and which quantile of the rest keeps which SLO."""

    __slots__ = ("levels", "rest", "tbt", "waits")

    def __init__(self) -> None:
        self.levels: dict[Slo, Level] = {}
        self.waits: dict[int, ErrorWindow] = {}
        self.rest = ErrorWindow()
        self.tbt = ErrorWindow(TBT_FLOOR_SECONDS)

    def level(self, slo: Slo) -> Level:
        level = self.levels.get(slo)
        if level is None:
            if len(self.levels) >= MAX_SLOS:
                self.levels.clear()
            level = self.levels[slo] = Level(slo.percentile)
        return level

    def wait(self, rank: int) -> ErrorWindow:
        window = self.waits.get(rank)
        if window is None:
            window = self.waits[rank] = ErrorWindow()
        return window


class Desk:
    """`judge` each request, and again at its turn; tell what became of it by `ended`."""

    def __init__(self, stats: Stats, rng: Random) -> None:
        self._stats = stats
        self._rng = rng
        self._probes = ProbeTurns()
        self._probe_share = 0.0  # of the request that is judged
        self._errors: dict[str, _Errors] = {}

    def judge(
        self,
        policies: SloAndRules,
        model: str,
        standing: Standing,
        predicted: Predicted,
        turn_seconds: float,
        now: float,
    ) -> Admission:
        """`turn_seconds`: the part of the predicted TTFT until leg 1 may go. It is judged by its
        median, as who waits too long can still be turned away; the rest by the percentile."""
        slo = policies.slo
        if slo.mode == "off":
            return ADMITTED
        errors = self._errors.get(model)
        if errors is not None:
            rest = predicted.ttft_seconds - turn_seconds
            ttft = errors.rest.quantile(rest, errors.level(slo).quantile, now)
            if turn_seconds > 0:
                ttft += errors.wait(standing.rank).quantile(turn_seconds, 50.0, now)
            tbt = predicted.tbt_seconds
            if tbt is not None:
                tbt = errors.tbt.quantile(tbt, slo.percentile, now)
            predicted = Predicted(ttft, predicted.wait_seconds, tbt)
        self._probe_share = policies.admission.probe_share
        return admit(slo, predicted, self._is_probe)

    def _is_probe(self) -> bool:
        return self._probes.is_due(self._probe_share, self._rng.random())

    def rest_seconds(self, slo: Slo, model: str, rest_seconds: float, now: float) -> float:
        """From the turn to the first token, as the SLO's percentile keeps it."""
        errors = self._errors.get(model)
        if errors is None:
            return rest_seconds
        return errors.rest.quantile(rest_seconds, errors.level(slo).quantile, now)

    def waited(self, model: str, rank: int, predicted: float, seconds: float, now: float) -> None:
        """A wait for a turn has ended, or was given up after so many seconds."""
        self._of(model).wait(rank).observe(predicted, seconds, now)

    def ended(
        self, slo: Slo, decision: Decision, turned_seconds: float, forecast: Forecast, now: float
    ) -> None:
        """A stream that has ended well; its turn came `turned_seconds` after its arrival. One that
        was tried again says nothing about predictions."""
        ttft = decision.ttft_seconds
        if ttft is None:
            return
        if not decision.retries:
            errors = self._of(decision.model)
            if forecast.rest_seconds is not None:
                errors.rest.observe(forecast.rest_seconds, ttft - turned_seconds, now)
            if forecast.tbt_seconds is not None and decision.tbt_p95_seconds is not None:
                errors.tbt.observe(forecast.tbt_seconds, decision.tbt_p95_seconds, now)
            if decision.admission is None and slo.mode == "enforce":
                errors.level(slo).observe(kept=ttft <= slo.max_ttft_seconds)
        verdict = decision.admission
        if verdict is not None and verdict.probe:
            verdict.met = keeps_slo(slo, ttft, decision.tbt_p95_seconds)
            verdict.measured_seconds = ttft if verdict.gate == "ttft" else decision.tbt_p95_seconds
            self._stats.probes += 1
            self._stats.probes_met += verdict.met
            self._probes.ended(met=verdict.met)
            if verdict.met and verdict.gate == "ttft":
                self._of(decision.model).level(slo).false_reject()

    def _of(self, model: str) -> _Errors:
        errors = self._errors.get(model)
        if errors is None:
            if len(self._errors) >= MAX_MODELS:
                self._errors.pop(next(iter(self._errors)))
            errors = self._errors[model] = _Errors()
        return errors


def verdict_of(admission: Admission, slo: Slo) -> Verdict | None:
    """For the record; None where the prediction keeps the SLO."""
    if not admission.breaks:
        return None
    return Verdict(
        gate=admission.breaks,
        predicted_seconds=admission.predicted_seconds,
        limit_seconds=admission.limit_seconds,
        percentile=slo.percentile,
        probe=admission.probe,
    )


def shed_verdict(gate: Gate, predicted_seconds: float, slo: Slo) -> Verdict:
    """Of a request that was let in and then turned away while it waited."""
    return Verdict(gate, predicted_seconds, slo.max_ttft_seconds, slo.percentile)


def slo_of(spec: dict[str, Any]) -> Slo:
    return Slo(
        mode=spec.get("mode", "observe"),
        max_ttft_seconds=spec.get("max_ttft_ms", 10_000) / 1000,
        max_tbt_seconds=spec.get("max_tbt_ms", 500) / 1000,
        percentile=float(spec.get("percentile", 95)),
        retry_after_max_seconds=int(spec.get("retry_after_max_s", 30)),
    )


def rules_of(spec: dict[str, Any]) -> AdmissionRules:
    usual = AdmissionRules()
    queue = usual.queue
    return AdmissionRules(
        priorities=tuple(spec.get("priorities", usual.priorities)),
        default_priority=spec.get("default_priority", usual.default_priority),
        probe_share=float(spec.get("probe_share", usual.probe_share)),
        hit_min_share=float(spec.get("hit_min_share", usual.hit_min_share)),
        max_wait_seconds=float(spec.get("max_wait_s", usual.max_wait_seconds)),
        queue=QueueRules(
            window_tokens=int(spec.get("window_tokens", queue.window_tokens)),
            window_seconds=spec.get("window_ms", queue.window_seconds * 1000) / 1000,
            hit_share=float(spec.get("hit_share", queue.hit_share)),
            quantum_tokens=int(spec.get("quantum_tokens", queue.quantum_tokens)),
            max_waiting=int(spec.get("max_waiting", queue.max_waiting)),
            fair=spec.get("fairness", "tenants") == "tenants",
            weights=dict(spec.get("tenant_weights", {})),
        ),
    )


def read_priority(headers: dict[bytes, bytes]) -> str:
    """`x-perilune-priority`, as the client asks for it."""
    value = headers.get(b"x-perilune-priority")
    return "" if value is None else value[:64].decode("latin-1").strip().lower()
