"""Tiny charts of odd series."""

from __future__ import annotations

import pytest

from console.viewmodel.sparkline import sparkline


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([5.0], "█"),
        ([0.0, 0.0, 0.0], "▁▁▁"),
        ([2.0, 2.0], "██"),
        ([None, 1.0, None], " █ "),
        ([float("nan"), 1.0], " █"),
        ([0.0, float("inf"), 7.0], "▁ █"),
        ([None, None], "  "),
        ([-1.0, 1.0], "▁█"),
    ],
)
def test_e31_odd_series_draw_without_an_exception(values: list[float | None], text: str) -> None:
    assert sparkline(values) == text


def test_the_scale_reaches_to_the_slo() -> None:
    assert sparkline([1.0], ceiling=2.0) == "▅"
    assert sparkline([4.0, 1.0], ceiling=2.0) == "█▃"


def test_ascii() -> None:
    assert sparkline([0.0, 1.0], ascii_only=True) == "_@"
