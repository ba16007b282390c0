"""Buckets: aligned, merged by kind, bounded."""

from __future__ import annotations

from console.viewmodel.history import MAX_SERIES, History, bucket_for, merge, rebucket
from controlplane.stats.schemas import Series, SeriesReply


def reply(values: list[float | None], metric: str = "requests", **more: object) -> SeriesReply:
    series = Series.model_validate(
        {"metric": metric, "source": "cluster", "values": values, **more}
    )
    return SeriesReply(start=1000.0, step_seconds=10, series=[series])


def values_of(history: History, metric: str = "requests") -> list[float | None]:
    found = history.frame((metric,), "cluster").series
    return found[0].values if found else []


def test_bucket_fits_the_columns() -> None:
    assert bucket_for(900, 90) == 10
    assert bucket_for(900, 55) == 20
    assert bucket_for(86400, 55) == 1800


def test_counters_add_and_gauges_take_the_worst() -> None:
    assert merge("requests", [1.0, None, 2.0]) == 3.0
    assert merge("ttft_p95_seconds", [1.0, 3.0, 2.0]) == 3.0
    assert merge("requests", [None, None]) is None
    assert merge("requests", [float("nan"), 1.0]) == 1.0


def test_ticks_add_to_the_open_bucket() -> None:
    history = History()
    history.load(reply([1.0, 2.0]))
    history.add(1015.0, {"cluster": {"requests": 5.0}})
    history.add(1021.0, {"cluster": {"requests": 7.0}})
    assert values_of(history)[-3:] == [1.0, 7.0, 7.0]


def test_a_gap_stays_a_gap() -> None:
    history = History()
    history.add(1000.0, {"cluster": {"requests": 1.0}})
    history.add(1030.0, {"cluster": {"requests": 2.0}})
    assert values_of(history)[-4:] == [1.0, None, None, 2.0]


def test_late_points_of_dropped_buckets_are_ignored() -> None:
    history = History(num_buckets=3)
    for at in range(1000, 1100, 10):
        history.add(float(at), {"cluster": {"requests": 1.0}})
    history.add(1000.0, {"cluster": {"requests": 100.0}})
    assert values_of(history) == [1.0, 1.0, 1.0]


def test_the_servers_buckets_win() -> None:
    history = History()
    history.add(1005.0, {"cluster": {"requests": 99.0}})
    history.load(reply([4.0]))
    assert values_of(history)[-1] == 4.0


def test_a_long_silence_does_not_fill_memory() -> None:
    history = History(num_buckets=5)
    history.add(1000.0, {"cluster": {"requests": 1.0}})
    history.add(1e9, {"cluster": {"requests": 2.0}})
    assert values_of(history) == [None, None, None, None, 2.0]


def test_e12_series_are_bounded() -> None:
    history = History()
    for number in range(MAX_SERIES + 50):
        history.add(1000.0, {f"node:{number}": {"requests": 1.0}})
    assert len(history) == MAX_SERIES


def test_rebucket_aligns_and_keeps_reset_marks() -> None:
    wide = rebucket(reply([1.0, 2.0, None, 4.0], marks=["", "", "R", ""]), 20, 1039.0)
    assert (wide.start, wide.step_seconds) == (1000.0, 20)
    assert wide.series[0].values == [3.0, 4.0]
    assert wide.series[0].marks == ["", "R"]
