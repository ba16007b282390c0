"""What needs attention, in the consoles' own numbers."""

from __future__ import annotations

from controlplane.fleet.schemas import Worker
from controlplane.gateways.schemas import Gateway
from controlplane.overview.attention import Since, findings
from controlplane.stats.schemas import Overview


def seen(**changes: object) -> Overview:
    values = {"cluster": "c", "at": 0.0, "window_seconds": 900.0, "slo_mode": "observe"}
    return Overview.model_validate(values | changes)


def texts(overview: Overview) -> list[str]:
    return [text for _, _, text, _ in findings([], [], [], overview)]


def test_a_limit_of_a_millisecond_is_not_zero() -> None:
    slow = seen(ttft_p95_seconds=0.34, slo_max_ttft_seconds=0.001)
    assert texts(slow) == ["TTFT P95 340 ms over SLO 1 ms"]


def test_each_number_has_its_limit_beside_it() -> None:
    overview = seen(
        tbt_p95_seconds=0.0612, slo_max_tbt_seconds=0.05, rejected_ratio=0.0712, kv_wait_ratio=0.389
    )
    assert texts(overview) == [
        "TBT P95 61.2 ms over SLO 50 ms",
        "7.1 % of requests rejected, alarm 5.0 %",
        "decode waits for KV 38.9 % of its time, alarm 15.0 %",
    ]


def test_a_line_keeps_its_time_while_its_number_moves() -> None:
    since = Since()
    for at, ttft in ((10.0, 0.34), (20.0, 0.41)):
        lines = since.lines(
            findings([], [], [], seen(ttft_p95_seconds=ttft, slo_max_ttft_seconds=0.001)), at
        )
    assert [line.since for line in lines] == [10.0]


def worker(name: str, data_path: str = "ok", **changes: object) -> Worker:
    values = {
        "id": name, "node_id": "n1", "role": "prefill", "model": "m", "url": "", "state": "ready",
        "data_path": data_path, "data_path_note": "answered 503" if data_path != "ok" else "",
    }  # fmt: skip
    return Worker.model_validate(values | changes)


def of_workers(*workers: Worker) -> list[tuple[str, str, str]]:
    found = findings([], list(workers), [], seen())
    return [(severity, text, opens) for _, severity, text, opens in found]


def test_a_worker_that_gateways_leave_out_is_said_though_its_probe_is_fine() -> None:
    text = "gateways leave p1 out, its requests fail: answered 503"
    assert of_workers(worker("p1", "ejected"), worker("p2")) == [("warn", text, "worker/p1")]
    alone = of_workers(worker("p1", "ejected"), worker("p2", state="loading"))
    assert alone == [("critical", text, "worker/p1")]
    assert of_workers(worker("p1", "trial"), worker("p2")) == []


def test_the_last_two_of_a_role_are_both_critical() -> None:
    both = of_workers(worker("p1", "ejected"), worker("p2", "ejected"))
    assert [severity for severity, *_ in both] == ["critical", "critical"]


def test_stuck_requests_are_said_of_a_gateway_that_reports() -> None:
    none = {"counts": [0]}
    row = {
        "id": "gw-1", "url": "", "pid": 1, "state": "ready", "view_revision": 1, "age_seconds": 0.2,
        "last_report_at": "2026-01-01T00:00:00Z",
        "stats": {"started_at": "2026-01-01T00:00:00Z", "ttft": none, "tbt": none, "queue": none, "stuck": 2},
    }  # fmt: skip
    gateway = Gateway.model_validate(row)
    (found,) = findings([], [], [gateway], seen())
    text = "2 requests are stuck at gw-1"
    assert found == ("gateway/gw-1/stuck", "warn", text, "in-flight")
    silent = Gateway.model_validate(row | {"state": "lost", "age_seconds": 60.0})
    (found,) = findings([], [], [silent], seen())
    assert found[1] == "critical", "what a lost gateway said last is no news"
