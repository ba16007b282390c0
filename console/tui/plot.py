"""The what-if curve as lines: capacity on a log scale, hit rate from 0 to 100 %."""

from __future__ import annotations

from itertools import pairwise

from console.tui.lines import Line, Span, line, toned
from console.viewmodel.curve import Curve
from console.viewmodel.table import Tone

LABELS = 7
MIN_HEIGHT, MAX_HEIGHT = 5, 17
MAX_STEP = 22
POINT, PATH, MEASURED = "o", ".", "*"
"""Signs of the prediction, the straight way between two of its points, and what was measured."""


def plot_lines(curve: Curve, width: int, height: int) -> list[Line]:
    """Rows from the top of the scale to 0 %, the axis, its labels, the legend."""
    if curve.empty:
        return [line(toned(f" {curve.empty}", "muted"))]
    height = max(MIN_HEIGHT, min(MAX_HEIGHT, height - 3))
    height -= 1 - height % 2  # the middle of the scale stands on a row of its own
    low, high = _range(curve)
    step = max(6, min(MAX_STEP, (width - LABELS - 12) // max(1, len(curve.points) - 1)))
    grid = _grid(curve, height, step, low, high)
    lines = [_row(grid, place, height, low, high) for place in range(height)]
    columns = len(grid[0])
    lines.append(line(toned(f"{'':>{LABELS}}+{'-' * columns}", "muted")))
    marks = [" "] * (columns + 8)
    for place, point in enumerate(curve.points):
        text = f"{point.label} now" if point.is_now else point.label
        marks[place * step + 1 : place * step + 1 + len(text)] = text
    lines.append(line(toned(f"{'':>{LABELS}} {''.join(marks).rstrip()}", "muted")))
    legend = f" {POINT} predicted   {MEASURED} measured {curve.measured_text}   x: capacity, y: % of what the pool is asked for"
    return [*lines, line(toned(legend[: width - 1], "muted"))]


def _range(curve: Curve) -> tuple[float, float]:
    """From 0 to the tenth above the highest value: bars of a share start at nothing."""
    known = [p.rate for p in curve.points if p.rate is not None]
    top = max([*known, curve.measured or 0.0], default=1.0)
    return 0.0, min(1.0, max(0.1, (int(top * 10 - 1e-9) + 1) / 10))


def _grid(curve: Curve, height: int, step: int, low: float, high: float) -> list[list[str]]:
    columns = (len(curve.points) - 1) * step + 3
    grid = [[" "] * columns for _ in range(height)]
    known = [(i * step + 1, p.rate) for i, p in enumerate(curve.points) if p.rate is not None]
    for (x0, y0), (x1, y1) in pairwise(known):
        for x in range(x0, x1 + 1):
            _put(grid, x, y0 + (y1 - y0) * (x - x0) / (x1 - x0), PATH, low, high)
    for x, y in known:
        _put(grid, x, y, POINT, low, high)
    now = next((i for i, p in enumerate(curve.points) if p.is_now), None)
    if now is not None and curve.measured is not None:
        _put(grid, now * step + 1, curve.measured, MEASURED, low, high)
    return grid


def _put(grid: list[list[str]], x: int, y: float, sign: str, low: float, high: float) -> None:
    height = len(grid)
    row = round((high - y) / (high - low) * (height - 1))
    grid[max(0, min(height - 1, row))][x] = sign


def _row(grid: list[list[str]], place: int, height: int, low: float, high: float) -> Line:
    value = high - (high - low) * place / (height - 1)
    shown = place in (0, (height - 1) // 2, height - 1)
    label = f"{value * 100:.0f} %" if shown else ""
    spans = [toned(f"{label:>{LABELS - 1}} |", "muted")]
    for sign in "".join(grid[place]).rstrip():
        tone: Tone = "warn" if sign == MEASURED else "accent" if sign == POINT else "muted"
        spans.append(toned(sign, tone) if sign != " " else Span(" "))
    return tuple(spans)
