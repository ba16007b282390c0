"""What needs attention, in the consoles' own numbers."""

from __future__ import annotations

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
