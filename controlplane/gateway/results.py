"""What is read of replies, for the record, the statistics and the predictions."""

from typing import Any

from controlplane.core.admission import Slo, keeps_slo
from controlplane.gateway.admission import verdict_of
from controlplane.gateway.asked import Asked
from controlplane.gateway.legs import LegError
from controlplane.gateway.outcome import Outcome
from controlplane.gateway.relay import Relay
from controlplane.gateway.scheduling import Plan
from controlplane.gateway.stats import Stats
from controlplane.gateway.telling import NOT_YET
from controlplane.gateway.usage import count, read_whole
from controlplane.gateway.wire import Decision

MIN_GAPS = 4
"""Fewer gaps than that say nothing about TBT."""


def new_decision(asked: Asked, plan: Plan, gateway_id: str) -> Decision:
    """The record of a running request, as far as it is used before it goes out (`Telling`)."""
    own_id = asked.request.headers.get(b"x-request-id")
    body, request_id = asked.body, asked.request_id
    decision = Decision(
        request_id,
        NOT_YET,
        gateway_id,
        "running",
        "" if own_id is None else own_id[:200].decode("latin-1"),
        request_id,
        asked.tenant,
        asked.model,
        "other" if body.passed else "chat" if body.chat else "completions",
        body.stream,
    )
    if body.passed:
        decision.route = asked.request.path.decode("latin-1")
    decision.prompt_tokens = asked.num_tokens
    decision.predicted_ttft_seconds = plan.predicted_ttft_seconds
    decision.priority = plan.standing.priority
    if asked.normalised:
        decision.normalised = list(asked.normalised)
    if plan.admission.breaks:
        decision.admission = verdict_of(plan.admission, plan.policies.slo)
    return decision


def read_reply(
    decision: Decision, body: bytes, details: dict[str, Any] | None, *, has_choices: bool
) -> bytes:
    """Take the outcome from a whole reply; the body for the client. `has_choices`: it must; raises
    `LegError`.

    `details` of the prompt's tokens replace decode's (A15), and our transfer parameters stay among ourselves.
    """
    reply = read_whole(body, details)
    if has_choices and not reply.has_choices:
        raise LegError("answered 200 without choices", 502, unreachable=False)
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
        decision.output_tokens = count(usage.get("completion_tokens"))
        if decision.engine_prompt_tokens is None:
            decision.engine_prompt_tokens = count(usage.get("prompt_tokens"))
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
