"""A lone series in one row of bars."""

from __future__ import annotations

from collections.abc import Sequence

from console.viewmodel.numbers import known

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"


def bars(values: Sequence[float | None], *, ceiling: float | None = None) -> tuple[int | None, ...]:
    """Heights 0 to 7 on a scale from 0 to the larger of `ceiling` and the maximum; None is a gap."""
    seen = [known(value) for value in values]
    top = max(
        [number for number in seen if number is not None] + [known(ceiling) or 0.0], default=0.0
    )
    return tuple(_height(number, top) for number in seen)


def _height(number: float | None, top: float) -> int | None:
    if number is None:
        return None
    if top <= 0 or number <= 0:
        return 0
    return min(7, int(number / top * 7 + 0.5))


def sparkline(
    values: Sequence[float | None], *, ceiling: float | None = None, ascii_only: bool = False
) -> str:
    """All zero is flat, a gap a space, one point one bar, nothing an empty text."""
    ramp = ASCII_BARS if ascii_only else BARS
    return "".join(
        " " if height is None else ramp[height] for height in bars(values, ceiling=ceiling)
    )
