"""Checks as the report shows them: what failed comes first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controlplane.doctor.asking import Answer
from controlplane.doctor.schemas import (
    CheckState,
    DoctorBound,
    DoctorCheck,
    DoctorNode,
    DoctorPair,
    DoctorReport,
    DoctorTransport,
)
from workers.core.disaggregation import Bound
from workers.core.doctor_checks import node_checks, unreachable
from workers.core.doctor_messages import NodeFacts, ProbeReport, TransportProbe
from workers.core.doctor_pairs import pair_checks
from workers.core.doctor_verdict import Check

WORST: tuple[CheckState, ...] = ("fail", "warn", "unknown", "ok")


def node_schema(answer: Answer) -> DoctorNode:
    """A node's checks, or that it does not answer."""
    if answer.facts is None:
        return node_of(answer.node, unreachable(answer.error))
    checks = node_checks(answer.facts, answer.clock_offset, answer.clock_error)
    return node_of(answer.node, checks)


def node_of(node: str, checks: Sequence[Check]) -> DoctorNode:
    return DoctorNode(node_id=node, state=_worst(checks), checks=_schemas(checks))


def pair_schema(
    report: ProbeReport, source: NodeFacts, destination: NodeFacts, bound: Bound | None
) -> DoctorPair:
    checks = pair_checks(report, source, destination, bound)
    return DoctorPair(
        source=report.source,
        destination=report.destination,
        state=_worst(checks),
        checks=_schemas(checks),
        transports=[_transport(found) for found in report.transports],
        control_seconds=report.control_seconds,
        clock_offset_seconds=report.clock_offset_seconds,
    )


def not_probed(source: Answer, destination: Answer) -> DoctorPair:
    """One end did not answer us, so nobody could be asked."""
    silent = source if source.facts is None else destination
    value = f"not probed: {silent.node} does not answer the control plane"
    way_out = f"Mend the check `agent` of {silent.node} first."
    checks = [Check("control", "unknown", value, "both agents answer", way_out)]
    return DoctorPair(
        source=source.node,
        destination=destination.node,
        state=_worst(checks),
        checks=_schemas(checks),
    )


def bound_schema(bound: Bound | None) -> DoctorBound | None:
    if bound is None:
        return None
    return DoctorBound.model_validate(
        {
            "bytes_per_second": bound.bytes_per_second,
            "kv_bytes_per_token": bound.kv_bytes_per_token,
            "tokens_per_second": bound.tokens_per_second,
            "origin": bound.source,
            "prompt_tokens": bound.prompt_tokens,
        }
    )


def counts_of(report: DoctorReport) -> dict[CheckState, int]:
    """How many checks of all are in which state."""
    parts: list[DoctorNode | DoctorPair] = [*report.nodes, *report.pairs]
    states = [check.state for part in parts for check in part.checks]
    return {state: states.count(state) for state in WORST}


def node_order(node: DoctorNode) -> tuple[int, str]:
    return WORST.index(node.state), node.node_id


def pair_order(pair: DoctorPair) -> tuple[int, str, str]:
    return WORST.index(pair.state), pair.source, pair.destination


def _transport(found: TransportProbe) -> DoctorTransport:
    return DoctorTransport(
        transport=found.transport,
        offered=found.offered,
        latency_seconds=found.small_seconds,
        bytes_per_second=found.bytes_per_second,
        small_bytes=found.small_bytes,
        large_bytes=found.large_bytes,
        window_ops=found.window_ops or None,
        error=found.small_error or found.large_error,
    )


def _schemas(checks: Iterable[Check]) -> list[DoctorCheck]:
    ordered = sorted(checks, key=lambda check: WORST.index(check.state))
    return [
        DoctorCheck(
            name=check.name,
            state=check.state,
            value=check.value,
            wanted=check.wanted,
            what_to_do=check.what_to_do,
        )
        for check in ordered
    ]


def _worst(checks: Iterable[Check]) -> CheckState:
    return min((check.state for check in checks), key=WORST.index, default="unknown")
