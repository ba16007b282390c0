"""Admission in this gateway: what predictions are worth, who is let in, and what became of it."""

from random import Random
from typing import Any

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
from controlplane.core.error_window import ErrorWindow
from controlplane.gateway.stats import Stats
from controlplane.gateway.wire import Decision, Verdict

TBT_FLOOR_SECONDS = 0.005
MAX_WINDOWS = 512


class _Errors:
    """How far predictions for one model and priority class were off."""

    __slots__ = ("tbt", "ttft")

    def __init__(self) -> None:
        self.ttft = ErrorWindow()
        self.tbt = ErrorWindow(TBT_FLOOR_SECONDS)


class Desk:
    """`judge` each request, tell what became of it by `ended`."""

    def __init__(self, stats: Stats, rng: Random) -> None:
        self._stats = stats
        self._rng = rng
        self._errors: dict[tuple[str, int], _Errors] = {}

    def judge(
        self,
        slo: Slo,
        rules: AdmissionRules,
        model: str,
        standing: Standing,
        predicted: Predicted,
        now: float,
    ) -> Admission:
        """`predicted` as it is expected; it is judged by what the SLO's percentile would get."""
        if slo.mode == "off":
            return ADMITTED
        errors = self._errors.get((model, standing.rank))
        if errors is not None:
            ttft = errors.ttft.quantile(predicted.ttft_seconds, slo.percentile, now)
            tbt = predicted.tbt_seconds
            if tbt is not None:
                tbt = errors.tbt.quantile(tbt, slo.percentile, now)
            predicted = Predicted(ttft, predicted.wait_seconds, tbt)
        return admit(slo, predicted, self._rng.random(), rules.probe_share)

    def ended(
        self, slo: Slo, standing: Standing, decision: Decision, tbt: float | None, now: float
    ) -> None:
        """A stream that has ended well; `tbt` is what was predicted. One that was tried again says
        nothing about predictions."""
        ttft = decision.ttft_seconds
        if ttft is None:
            return
        if not decision.retries:
            errors = self._of(decision.model, standing.rank)
            if decision.predicted_ttft_seconds is not None:
                errors.ttft.observe(decision.predicted_ttft_seconds, ttft, now)
            if tbt is not None and decision.tbt_p95_seconds is not None:
                errors.tbt.observe(tbt, decision.tbt_p95_seconds, now)
        verdict = decision.admission
        if verdict is not None and verdict.probe:
            verdict.met = keeps_slo(slo, ttft, decision.tbt_p95_seconds)
            verdict.measured_seconds = ttft if verdict.gate == "ttft" else decision.tbt_p95_seconds
            self._stats.probes += 1
            self._stats.probes_met += verdict.met

    def _of(self, model: str, rank: int) -> _Errors:
        errors = self._errors.get((model, rank))
        if errors is None:
            if len(self._errors) >= MAX_WINDOWS:
                self._errors.pop(next(iter(self._errors)))
            errors = self._errors[model, rank] = _Errors()
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
