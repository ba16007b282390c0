"""Fits find the line they are shown and stay sane on bad data; errors are counted honestly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.fitting import Calibration, LinearFit


class TestLinearFit:
    def test_finds_a_line(self) -> None:
        fit = LinearFit((0.0, 0.0))
        for i in range(200):
            fit.observe((1.0, float(i % 7)), 3.0 + 0.5 * (i % 7))
        assert fit.predict((1.0, 10.0)) == pytest.approx(8.0, rel=0.01)

    def test_forgets_what_was(self) -> None:
        fit = LinearFit((0.0, 0.0))
        for i in range(100):
            fit.observe((1.0, float(i % 5)), 1.0 * (i % 5))
        for i in range(600):
            fit.observe((1.0, float(i % 5)), 4.0 * (i % 5))
        assert fit.predict((1.0, 5.0)) == pytest.approx(20.0, rel=0.05)

    def test_coefficients_of_times_stay_at_zero_or_above(self) -> None:
        fit = LinearFit((0.1, 0.1), non_negative=True)
        for i in range(50):
            fit.observe((1.0, float(i % 5)), 5.0 - (i % 5))
        assert min(fit.theta) == 0.0
        assert fit.predict((1.0, 2.0)) == pytest.approx(3.0, rel=0.3)

    @given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 100)), max_size=200), st.booleans())
    def test_stays_finite(self, samples: list[tuple[float, float]], bounded: bool) -> None:
        fit = LinearFit((0.1, 0.1), non_negative=bounded)
        for x, y in samples:
            fit.observe((1.0, x), y)
        assert abs(fit.predict((1.0, 1.0))) < 1e9
        assert not bounded or min(fit.theta) >= 0

    @pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf"), 1e300, -1e300])
    def test_what_no_measurement_brings_is_left_out(self, odd: float) -> None:
        fit = LinearFit((0.0, 0.0))
        for i in range(50):
            fit.observe((1.0, float(i % 5)), 1.0 + i % 5)
            fit.observe((1.0, 1.0), odd)
            fit.observe((1.0, odd), 1.0, 0.5)
        assert fit.num_samples == 50
        assert fit.predict((1.0, 3.0)) == pytest.approx(4.0, rel=0.01)


def test_calibration_is_the_median_of_the_last() -> None:
    calibration = Calibration()
    assert calibration.median_relative_error() is None
    for predicted in (1.1, 0.9, 3.0):
        calibration.observe(predicted, 1.0)
    assert calibration.median_relative_error() == pytest.approx(0.1)
    for _ in range(100):
        calibration.observe(1.5, 1.0)
    assert calibration.median_relative_error() == pytest.approx(0.5)
    assert calibration.num_samples == 103
