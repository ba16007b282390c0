"""Eight fixed levels, with hysteresis."""

from __future__ import annotations

import pytest

from console.viewmodel import levels
from console.viewmodel.levels import EVICTIONS, FAILURES, HIT_RATE, KV_WAIT, LATENCY, SHM_BYTES

SCALES = (HIT_RATE, LATENCY, KV_WAIT, EVICTIONS, SHM_BYTES, FAILURES)


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: scale.name)
def test_a_scale_has_eight_levels_with_words(scale: levels.Scale) -> None:
    assert len(scale.edges) == levels.NUM_LEVELS - 1
    assert len(scale.labels) == levels.NUM_LEVELS
    ordered = sorted(scale.edges, reverse=scale.low_is_strong)
    assert list(scale.edges) == ordered


def test_low_hit_rate_is_strong() -> None:
    assert [HIT_RATE.level(v) for v in (1.0, 0.95, 0.94, 0.5, 0.31, 0.1, 0.09, 0.0)] == [
        0, 0, 1, 4, 5, 6, 7, 7,
    ]  # fmt: skip


def test_the_top_level_is_open() -> None:
    assert LATENCY.level(5.0) == 7
    assert LATENCY.level(5000.0) == 7


def test_zero_is_exact_where_the_first_edge_is_zero() -> None:
    assert EVICTIONS.level(0.0) == 0
    assert EVICTIONS.level(0.001) == 1


def test_unknown_has_no_level() -> None:
    assert LATENCY.level(None) is None
    assert LATENCY.level(float("nan")) is None


def test_a_cell_moves_only_past_a_tenth_of_the_step() -> None:
    assert LATENCY.level(0.101, previous=1) == 1
    assert LATENCY.level(0.106, previous=1) == 2
    assert LATENCY.level(0.099, previous=2) == 2
    assert LATENCY.level(0.094, previous=2) == 1
    assert HIT_RATE.level(0.948, previous=0) == 0
    assert HIT_RATE.level(0.94, previous=0) == 1
    assert LATENCY.level(4.0, previous=0) == 6  # several levels at once: no hysteresis


def test_alarm() -> None:
    assert HIT_RATE.breaches(0.412)
    assert not HIT_RATE.breaches(0.5)
    assert LATENCY.breaches(2.0)
    assert not LATENCY.breaches(None)


def test_every_ramp_has_eight_steps() -> None:
    for table in (levels.TRUECOLOR, levels.COLOR256, levels.COLOR16, levels.TEXT_ON):
        assert {len(steps) for steps in table.values()} == {levels.NUM_LEVELS}
    assert len(set(levels.GLYPHS)) == levels.NUM_LEVELS
