"""What is read of replies, for the record, the statistics and the predictions."""

from datetime import UTC, datetime, timedelta
from typing import Any

from controlplane.core.admission import Slo, keeps_slo
from controlplane.core.routing import decode_candidates, prefill_candidates
from controlplane.gateway.admission import verdict_of
from controlplane.gateway.asked import Asked
from controlplane.gateway.outcome import Outcome
from controlplane.gateway.relay import Relay
from controlplane.gateway.scheduling import Plan
from controlplane.gateway.stats import Stats
from controlplane.gateway.usage import read_whole
from controlplane.gateway.wire import Decision

MIN_GAPS = 4
"""Fewer gaps than that say nothing about TBT."""


def new_decision(asked: Asked, plan: Plan, gateway_id: str, planned_at: float) -> Decision:
    """The record of a running request, with every candidate's terms."""
    admitted = plan.admission.admitted
    first = plan.free_decode[0].worker_id if admitted and plan.free_decode else ""
    own_id = asked.request.headers.get(b"x-request-id", b"")[:200].decode("latin-1")
    slo = None if admitted else _bound_of_prefill(plan)
    return Decision(
        request_id=asked.request_id,
        at=datetime.now(UTC) - timedelta(seconds=planned_at - asked.request.received_at),
        gateway_id=gateway_id,
        status="running",
        client_request_id=own_id,
        transfer_id=asked.request_id,
        tenant=asked.tenant,
        model=asked.model,
        api="other" if asked.body.passed else "chat" if asked.body.chat else "completions",
        stream=asked.body.stream,
        policy_revisions=plan.policies.revisions,
        balancing_threshold=plan.policies.scheduling.rules.balancing_threshold,
        normalised=list(asked.normalised),
        prompt_tokens=asked.num_tokens,
        prefill_candidates=prefill_candidates(
            plan.prefill, by_turn=plan.by_turn, broken_slo_seconds=slo
        ),
        decode_candidates=decode_candidates(plan.decode, first),
        predicted_ttft_seconds=plan.predicted_ttft_seconds,
        priority=plan.standing.priority,
        admission=verdict_of(plan.admission, plan.policies.slo),
        observed_placement=plan.observed,
    )


def _bound_of_prefill(plan: Plan) -> float:
    """The TTFT bound less what comes after prefill, which is alike for every candidate."""
    after = 0.0
    if plan.prefill and plan.predicted_ttft_seconds is not None:
        after = max(0.0, plan.predicted_ttft_seconds - plan.prefill[0].ttft_seconds)
    return plan.policies.slo.max_ttft_seconds - after


def read_reply(decision: Decision, body: bytes, details: dict[str, Any] | None) -> bytes:
    """Take the outcome from a whole reply; the body for the client.

    `details` of the prompt's tokens replace decode's (A15), and our transfer parameters stay among ourselves.
    """
    reply = read_whole(body, details)
    decision.output_tokens = reply.completion_tokens
    if decision.engine_prompt_tokens is None:
        decision.engine_prompt_tokens = reply.prompt_tokens
    decision.status = "finished_length" if reply.by_length else "finished_stop"
    return reply.body


def read_stream(
    decision: Decision, outcome: Outcome, relay: Relay, gaps: list[float], stats: Stats
) -> None:
    """Take the outcome from a stream that has ended as it should; `gaps` in rising order."""
    read_first_byte(decision, outcome, relay)
    if gaps:
        decision.tbt_p95_seconds = gaps[min(len(gaps) - 1, int(0.95 * len(gaps)))]
        stats.tbt.observe_all(gaps)
    decision.status = "finished_length" if relay.finished_by_length else "finished_stop"
    usage = relay.usage()
    if usage is not None:
        decision.output_tokens = usage.get("completion_tokens")
        if decision.engine_prompt_tokens is None:
            decision.engine_prompt_tokens = usage.get("prompt_tokens")
    if decision.ttft_seconds is not None:
        stats.ttft.observe(decision.ttft_seconds)
        if decision.predicted_ttft_seconds is not None:
            stats.ttft_calibration.observe(decision.predicted_ttft_seconds, decision.ttft_seconds)


def read_first_byte(decision: Decision, outcome: Outcome, relay: Relay) -> None:
    outcome.first_byte_at = relay.first_at
    decision.ttft_seconds = relay.first_at - outcome.received_at


def count_slo(slo: Slo, decision: Decision, stats: Stats) -> None:
    """Attainment is of streams: a plain reply has no first token to time."""
    if slo.mode == "off" or decision.ttft_seconds is None:
        return
    if keeps_slo(slo, decision.ttft_seconds, decision.tbt_p95_seconds):
        stats.slo_met += 1
    else:
        stats.slo_missed += 1
