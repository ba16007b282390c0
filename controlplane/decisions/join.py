"""How a decision record and its legs' reports become one, whichever comes first. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from controlplane.decisions.schemas import Decision, Leg
from workers.core.messages import LegReport

WIRE_STAGES = ("wire", "verify", "scatter")
DECODE_PHASE = "handover"
"""The phase that begins when the decode leg is sent."""


@dataclass(frozen=True, slots=True)
class KvOutcome:
    """What a finished request tells the statistics about its KV. Seconds."""

    decode_worker: str
    waited_seconds: float
    decode_seconds: float | None
    """How long the decode leg took in all; null where the record does not tell."""
    pair: str | None
    transfer_seconds: float
    transfer_failed: bool
    weight: int = 1
    """Requests that it stands for, where records are sampled."""


def join(decision: Decision, reports: Iterable[LegReport]) -> Decision:
    """Fill in the legs that the gateway did not have. What the gateway says stands."""
    changed: dict[str, object] = {}
    # after a retry several workers report a leg: the ones that the decision names come first
    chosen = {decision.prefill_worker, decision.decode_worker}
    for report in sorted(reports, key=lambda report: report.worker_id not in chosen):
        place = _place(decision, report)
        if place is not None and getattr(decision, place) is None and place not in changed:
            changed[place] = _leg(report)
    prefill = changed.get("prefill_leg")
    if isinstance(prefill, Leg):
        if decision.hit_tokens is None:
            changed["hit_tokens"] = min(
                prefill.device_hit_tokens + prefill.pool_hit_tokens, prefill.prompt_tokens
            )
        if decision.engine_prompt_tokens is None:
            changed["engine_prompt_tokens"] = prefill.prompt_tokens
    return decision.model_copy(update=changed) if changed else decision


def _place(decision: Decision, report: LegReport) -> str | None:
    if report.kv_role == "kv_producer":
        return "prefill_leg"
    if report.kv_role == "kv_consumer":
        return "decode_leg"
    if report.worker_id == decision.prefill_worker:
        return "prefill_leg"
    return "decode_leg" if report.worker_id == decision.decode_worker else None


def _leg(report: LegReport) -> Leg:
    values = msgspec.structs.asdict(report)
    return Leg.model_validate({name: values[name] for name in Leg.model_fields})


def is_final(status: str) -> bool:
    return status != "running"


def supersedes(new: Decision, old_status: str) -> bool:
    """The later record wins, but a repeated early one does not bring a request back to life."""
    return is_final(new.status) or not is_final(old_status)


def kv_outcome(decision: Decision) -> KvOutcome | None:
    """For the statistics, once: when the request has ended and its decode leg is known."""
    leg = decision.decode_leg
    if leg is None or not is_final(decision.status) or not decision.decode_worker:
        return None
    moved = leg.loaded_blocks + leg.failed_blocks > 0 and decision.prefill_worker
    stages = [
        leg.kv_wait_by_stage_seconds[s] for s in WIRE_STAGES if s in leg.kv_wait_by_stage_seconds
    ]
    return KvOutcome(
        decode_worker=decision.decode_worker,
        waited_seconds=leg.kv_wait_seconds,
        decode_seconds=_decode_seconds(decision, leg),
        pair=f"{decision.prefill_worker}>{decision.decode_worker}" if moved else None,
        transfer_seconds=sum(stages) if stages else leg.kv_wait_seconds,
        transfer_failed=leg.failed_blocks > 0,
        weight=decision.sampled_one_in,
    )


def _decode_seconds(decision: Decision, leg: Leg) -> float | None:
    if decision.e2e_seconds is None:
        return None
    begun = next((p.start_seconds for p in decision.phases if p.name == DECODE_PHASE), None)
    if begun is not None:
        return max(decision.e2e_seconds - begun, leg.kv_wait_seconds)
    if decision.ttft_seconds is not None:
        return leg.kv_wait_seconds + max(0.0, decision.e2e_seconds - decision.ttft_seconds)
    return None
