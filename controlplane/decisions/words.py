"""What a record says in words, the same on the command line and in the consoles. Pure."""

from __future__ import annotations

from controlplane.decisions.schemas import Decision
from workers.core.error_text import error_text
from workers.core.numbers import NO_TRAFFIC, duration

_KIND_OF_GATE = {"ttft": "slo", "tbt": "slo", "deadline": "slo", "queue_full": "admission"}


def route(decision: Decision) -> str:
    """`p1 -> d1`; a rejected request names the best that was not good enough."""
    prefill, decode = decision.prefill_worker, decision.decode_worker
    if decision.status == "rejected" and not decode:
        best = min(decision.prefill_candidates, key=lambda c: c.ttft_seconds, default=None)
        return f"{best.worker_id} best" if best else NO_TRAFFIC
    if not prefill and not decode:
        return NO_TRAFFIC
    return f"{prefill or NO_TRAFFIC} -> {decode or NO_TRAFFIC}"


def deciding_policy(decision: Decision) -> str:
    """`slo/default r2`, by which admission turned it away; empty where no record says."""
    kind = _KIND_OF_GATE.get(decision.admission.gate, "") if decision.admission else ""
    for name, revision in decision.policy_revisions.items():
        if kind and name.startswith(f"{kind}/"):
            return f"{name} r{revision}"
    return ""


def rejection(decision: Decision) -> str:
    """`TTFT 84.7 ms > 62 ms, slo/default r2; 429, Retry-After 30.0 s`: what decided comes first, as
    narrow columns cut what is behind it."""
    verdict = decision.admission
    if verdict is not None and verdict.gate in ("ttft", "tbt"):
        predicted, limit = duration(verdict.predicted_seconds), duration(verdict.limit_seconds)
        reason = f"{verdict.gate.upper()} {predicted} > {limit}"
    else:
        reason = error_text(decision.error) or "rejected"
    policy = deciding_policy(decision)
    retry = decision.retry_after_seconds
    after = f", Retry-After {duration(retry)}" if retry is not None else ""
    by = f", {policy}" if policy else ""
    return f"{reason}{by}; {decision.http_status or 429}{after}"
