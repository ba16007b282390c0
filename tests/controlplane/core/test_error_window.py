"""Quantiles of how far predictions were off, and what false rejections are estimated from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.error_window import (
    MAX_AGE_SECONDS,
    MAX_SAMPLES,
    MIN_SAMPLES,
    ErrorWindow,
    Level,
)
from controlplane.core.ledger import Probe, false_rejects, would_have_met


def filled(ratio_of: list[float], now: float = 0.0) -> ErrorWindow:
    window = ErrorWindow(floor_seconds=0.0)
    for ratio in ratio_of:
        window.observe(1.0, ratio, now)
    return window


def test_too_few_samples_say_nothing() -> None:
    window = filled([9.0] * (MIN_SAMPLES - 1))
    assert window.quantile(1.0, 95, 0.0) == 1.0
    window.observe(1.0, 9.0, 0.0)
    assert window.quantile(1.0, 95, 0.0) == pytest.approx(9.0)


@pytest.mark.parametrize("percentile", [50, 90, 95, 99])
def test_the_percentile_is_kept_by_that_share(percentile: float) -> None:
    rng = random.Random(7)
    ratios = [rng.lognormvariate(0.0, 0.3) for _ in range(MAX_SAMPLES)]
    bound = filled(ratios).quantile(2.0, percentile, 0.0)
    later = [2.0 * rng.lognormvariate(0.0, 0.3) for _ in range(20_000)]
    kept = sum(value <= bound for value in later) / len(later) * 100
    assert abs(kept - percentile) < 5


def test_small_predictions_are_judged_by_the_floor() -> None:
    window = ErrorWindow(floor_seconds=0.05)
    for _ in range(MIN_SAMPLES):
        window.observe(0.0, 0.05, 0.0)  # 50 ms late of nothing
    assert window.quantile(0.0, 95, 0.0) == pytest.approx(0.05)
    assert window.quantile(1.0, 95, 0.0) < 2.2


def test_bad_news_are_forgotten_though_no_new_ones_come() -> None:
    window = filled([9.0] * 50)
    assert window.quantile(1.0, 95, MAX_AGE_SECONDS) > 8
    assert window.quantile(1.0, 95, MAX_AGE_SECONDS + 1) == 1.0
    assert len(window) == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=400))
def test_bounded_and_consistent(samples: list[tuple[float, float]]) -> None:
    window = ErrorWindow()
    for now, (predicted, measured) in enumerate(samples):
        window.observe(predicted, measured, float(now))
    window.check_integrity()
    low, high = (window.quantile(1.0, p, float(len(samples))) for p in (50, 99))
    assert 0 <= low <= high


def test_false_rejects_say_how_sure_they_are() -> None:
    assert false_rejects(0, 0).ratio is None
    few, many = false_rejects(10, 1), false_rejects(1000, 100)
    assert few.ratio == many.ratio == 0.1
    assert few.low < many.low < 0.1 < many.high < few.high  # type: ignore[operator]
    assert false_rejects(5, 0).low == 0.0
    assert (false_rejects(5, 0).high or 0) > 0.3


def test_a_rejected_request_is_judged_by_its_likes() -> None:
    probes = [Probe(1.0 + i / 100, met=i < 30) for i in range(100)]
    assert would_have_met(1.05, probes).ratio == 1.0
    assert would_have_met(1.9, probes).ratio == 0.0
    assert would_have_met(1.3, probes).ratio == pytest.approx(0.5, abs=0.1)
    assert would_have_met(1.3, []).samples == 0


@pytest.mark.parametrize("percentile", [80.0, 95.0])
@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_of_those_let_in_the_percentile_keeps_its_bound(percentile: float, spread: float) -> None:
    """Bounds that press: whoever the level lets in is just below it."""
    rng = random.Random(3)
    level, window = Level(percentile), filled([rng.lognormvariate(0, spread) for _ in range(200)])
    kept = 0
    for _ in range(4000):
        room = 1.0 / window.quantile(1.0, level.quantile, 0.0)  # predicted at most
        ok = room * rng.lognormvariate(0, spread) <= 1.0
        level.observe(kept=ok)
        kept += ok
    assert kept / 40 == pytest.approx(percentile, abs=1.5)


def test_without_risk_the_median_decides() -> None:
    level = Level(95.0)
    assert level.quantile == pytest.approx(95.0)
    for _ in range(1000):
        level.observe(kept=True)
    assert level.quantile == 50.0
    for _ in range(20):
        level.observe(kept=False)
    assert level.quantile > 99.0


def test_bad_predictions_do_not_keep_those_out_that_show_it() -> None:
    """Ten times too much is predicted, now and then by far too little: the high quantile turns all
    away, and only one in twenty of these is let in."""
    rng = random.Random(5)
    level, window = Level(95.0), ErrorWindow(floor_seconds=0.0)

    def measure(now: int) -> float:
        measured = 12.0 if rng.random() < 0.06 else 0.4
        window.observe(4.0, measured, float(now))
        return measured

    for now in range(MIN_SAMPLES):
        measure(now)
    window.observe(4.0, 12.0, 0.0)
    window.observe(4.0, 12.0, 0.0)
    assert window.quantile(4.0, level.quantile, 0.0) > 2.0
    rejected = 0
    for now in range(400):
        admitted = window.quantile(4.0, level.quantile, float(now)) <= 2.0
        rejected += not admitted
        if admitted or rejected % 20 == 0:
            kept = measure(now) <= 2.0
            if admitted:
                level.observe(kept=kept)
            elif kept:
                level.false_reject()
    assert rejected < 150
