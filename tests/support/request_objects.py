"""Requests in flight, the ledger and gateways' loads, as the control plane gives them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from controlplane.core.ledger import false_rejects
from controlplane.gateways.running_schemas import GatewayAnswer, RunningList, RunningRequest
from controlplane.gateways.schemas import (
    HISTOGRAM_BOUNDS_SECONDS,
    Gateway,
    GatewayStats,
    Histogram,
    WorkerLoad,
)
from controlplane.ledger.schemas import (
    CauseSummary,
    ClassSummary,
    FalseRejects,
    LedgerEntry,
    LedgerList,
    LedgerSummary,
)


def make_running_request(number: int, **changes: Any) -> RunningRequest:
    values: dict[str, Any] = {
        "request_id": f"{number:08x}cafe4711", "gateway": "gw-1", "tenant": "acme",
        "model": "llama-8b", "state": "decoding", "age_seconds": 12.0 + number,
        "waits_for": "the next piece of the decode leg on worker d5", "worker": "d5",
        "wait_seconds": 0.03, "bound_seconds": 150.0, "at_bound": "end",
        "prefill_worker": "p3", "decode_worker": "d5", "prompt_tokens": 12288,
    }  # fmt: skip
    return RunningRequest.model_validate(values | changes)


def make_answer(name: str, at: datetime, **changes: Any) -> GatewayAnswer:
    values: dict[str, Any] = {
        "gateway": name, "state": "ready", "answers": True, "running": 4, "stuck": 1,
        "age_seconds": 0.2, "last_report_at": at,
    }  # fmt: skip
    return GatewayAnswer.model_validate(values | changes)


def make_running(at: datetime) -> RunningList:
    """A stuck one, one near its bound, one without a bound, one of a gateway that fell silent."""
    items = [
        make_running_request(1, stuck=True, state="prefilling", wait_seconds=340.0, age_seconds=341.0,
                             bound_seconds=330.0, waits_for="the prefill leg on worker p3", worker="p3", retries=1),
        make_running_request(2, state="waiting", wait_seconds=100.0, bound_seconds=120.0,
                             waits_for="its turn at a prefill worker", worker="", at_bound="report"),
        make_running_request(3, tenant="batch"),
        make_running_request(4, gateway="gw-2", wait_seconds=7.0, bound_seconds=None, at_bound="",
                             waits_for="the client to read", worker=""),
    ]  # fmt: skip
    silent = make_answer(
        "gw-2", at - timedelta(seconds=46), state="lost", answers=False, running=1, stuck=0,
        age_seconds=45.0, silent_since=at - timedelta(seconds=44), problem="no answer within 2 s",
    )  # fmt: skip
    return RunningList(
        items=items, total=5, stuck=1, by_state={"decoding": 2, "prefilling": 1, "waiting": 1},
        gateways=[make_answer("gw-1", at), silent],
    )  # fmt: skip


def wrong(samples: int, met: int) -> FalseRejects:
    return FalseRejects.model_validate(false_rejects(samples, met), from_attributes=True)


def make_entry(number: int, at: datetime, **changes: Any) -> LedgerEntry:
    values: dict[str, Any] = {
        "request_id": f"{number:08x}cafe4711", "at": at - timedelta(seconds=number),
        "kind": "rejected", "gate": "ttft", "model": "llama-8b", "tenant": "acme",
        "priority": "batch", "predicted_seconds": 2.31, "limit_seconds": 2.0,
        "retry_after_seconds": 3.0, "would_have_met": wrong(20, 1), "policy": "slo/default r41",
    }  # fmt: skip
    return LedgerEntry.model_validate(values | changes)


def make_ledger(at: datetime) -> LedgerList:
    plain = {"retry_after_seconds": None, "would_have_met": None}
    return LedgerList(items=[
        make_entry(1, at),
        make_entry(2, at, would_have_met=wrong(20, 19), predicted_seconds=2.02),
        make_entry(3, at, would_have_met=wrong(20, 9)),
        make_entry(4, at, would_have_met=wrong(0, 0), gate="tbt"),
        make_entry(5, at, kind="shed", gate="queue_full", would_have_met=None),
        make_entry(6, at, kind="probe", measured_seconds=1.9, met=True, **plain),
        make_entry(7, at, kind="probe", measured_seconds=2.6, met=False, **plain),
        make_entry(8, at, kind="probe", **plain),
    ])  # fmt: skip


LAST_AT = datetime(2026, 12, 1, 13, 7, 21, tzinfo=UTC)


def make_summary(**changes: Any) -> LedgerSummary:
    values: dict[str, Any] = {
        "window_seconds": 3600.0, "rejected": 1204, "shed": 31, "probes": 62,
        "false_rejects": wrong(58, 7),
        "classes": [
            ClassSummary(priority="batch", rejected=1200, shed=30, probes=60, false_rejects=wrong(57, 7)),
            ClassSummary(priority="interactive", rejected=4, shed=1, probes=2, false_rejects=wrong(0, 0)),
        ],
        "causes": [
            CauseSummary(gate="ttft", policy="slo/default r41", turned_away=1190, last_at=LAST_AT),
            CauseSummary(gate="ttft", policy="slo/default r40", turned_away=14, last_at=LAST_AT),
        ],
    }  # fmt: skip
    return LedgerSummary.model_validate(values | changes)


def make_gateway(name: str, at: datetime, loads: dict[str, WorkerLoad], **changes: Any) -> Gateway:
    empty = Histogram(counts=[0] * (len(HISTOGRAM_BOUNDS_SECONDS) + 1))
    stats = GatewayStats(
        started_at=at - timedelta(hours=2), ttft=empty, tbt=empty, queue=empty, workers=loads,
        ttft_error=0.081, transfer_error=0.2,
    )  # fmt: skip
    values: dict[str, Any] = {
        "id": name, "url": "http://127.0.0.1:8000", "pid": 4712, "state": "ready",
        "view_revision": 7, "last_report_at": at, "age_seconds": 0.3, "stats": stats,
    }  # fmt: skip
    return Gateway.model_validate(values | changes)


def make_gateways(
    at: datetime, names: tuple[str, str, str, str] = ("p3", "d5", "d6", "d7")
) -> list[Gateway]:
    """One that has ejected the second worker, one that is silent."""
    sound, out, failing, trial = names
    return [
        make_gateway("gw-1", at, {
            sound: WorkerLoad(requests_total=4120, prefill_samples=412, prefill_error=0.062),
            out: WorkerLoad(requests_total=3800, failures_total=12, data_path="ejected",
                             data_path_note="probe ok, requests failing: answered 502",
                             failures_in_a_row=4, outcomes=20, outcomes_failed=10, pause_seconds=4.2),
            failing: WorkerLoad(requests_total=900, failures_total=1, failures_in_a_row=1, outcomes=3,
                             outcomes_failed=1, tbt_samples=30, tbt_error=0.71),
            trial: WorkerLoad(data_path="trial", outcomes=8, outcomes_failed=5, failures_in_a_row=3),
        }),
        make_gateway("gw-2", at - timedelta(seconds=14), {sound: WorkerLoad(requests_total=1)},
                     state="stale", age_seconds=14.0),
    ]  # fmt: skip
