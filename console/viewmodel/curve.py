"""The what-if curve: hit rate at other capacities, from the live key stream."""

from __future__ import annotations

from dataclasses import dataclass

from console.viewmodel import numbers
from console.viewmodel.table import Column, Row, Table, Text
from controlplane.nodes.pool_schemas import PoolReport

NOW_FACTOR = 1.0
FAR_POINTS = 0.05
FLAT_POINTS = 0.01
"""Doubling the pool that gains less than this is not worth its memory."""
NOT_YET = "Waiting for the pool's first report."
NO_KEYS = "No curve yet: it is drawn from the keys of requests, and too few have come (not a hit rate of 0)."


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """`difference` is against the prediction for today's capacity."""

    factor: float
    label: str  # 2x
    capacity: str
    rate: float | None
    text: str
    difference: str

    @property
    def is_now(self) -> bool:
        """Today's capacity."""
        return self.factor == NOW_FACTOR


@dataclass(frozen=True, slots=True)
class Curve:
    """`measured` is today's real rate; `empty` says why there is no curve."""

    points: tuple[CurvePoint, ...]
    measured: float | None
    measured_text: str
    verdict: str
    empty: str = ""


def curve(report: PoolReport | None) -> Curve:
    """Points by capacity, from small to large."""
    if report is None:
        return Curve((), None, numbers.UNKNOWN, "", NOT_YET)
    measured = numbers.known(report.measured_hit_rate)
    text = numbers.percent(measured)
    if measured is None:
        text = numbers.NO_TRAFFIC if report.asked_tokens == 0 else numbers.UNKNOWN
    now = next((p.hit_rate for p in report.curve if p.capacity_factor == NOW_FACTOR), None)
    points = tuple(
        CurvePoint(
            p.capacity_factor,
            f"{p.capacity_factor:g}x",
            numbers.stored_bytes(p.capacity_bytes),
            numbers.known(p.hit_rate),
            numbers.percent(p.hit_rate),
            _difference(p.hit_rate, now, is_now=p.capacity_factor == NOW_FACTOR),
        )
        for p in sorted(report.curve, key=lambda p: p.capacity_factor)
    )
    known = [p for p in points if p.rate is not None]
    verdict = " ".join(part for part in (_verdict(known, now), _below(now, measured)) if part)
    return Curve(points, measured, text, verdict if known else "", "" if known else NO_KEYS)


CURVE_COLUMNS = (
    Column("factor", "CAPACITY", 9, "right"),
    Column("bytes", "BYTES", 10, "right"),
    Column("rate", "HIT RATE %", 10, "right"),
    Column("difference", "AGAINST NOW", 12, "right"),
)


def curve_table(curve: Curve) -> Table:
    """The same numbers as rows."""
    rows = tuple(
        Row(
            point.label,
            (
                Text(point.label + (" now" if point.is_now else "")),
                Text(point.capacity),
                Text(numbers.percent(point.rate, unit=False), "strong"),
                Text(point.difference),
            ),
        )
        for point in curve.points
    )
    return Table(CURVE_COLUMNS, rows, curve.empty)


def _difference(rate: float | None, now: float | None, *, is_now: bool) -> str:
    if is_now:
        return "now"
    return numbers.UNKNOWN if rate is None or now is None else numbers.points(rate - now)


def _below(now: float | None, measured: float | None) -> str:
    """The prediction is of a warm pool without quotas and pins: what is lost to these shows here."""
    if now is None or measured is None or now - measured < FAR_POINTS:
        return ""
    gap = numbers.points(measured - now).lstrip("+-")
    return f"Measured is {gap} below the prediction: quotas, pins, purges or a cold start."


def _verdict(known: list[CurvePoint], now: float | None) -> str:
    larger = [p for p in known if p.factor > NOW_FACTOR]
    smaller = [p for p in known if p.factor < NOW_FACTOR]
    if now is None or not larger:
        return ""
    twice, half = larger[0], smaller[-1] if smaller else None
    gain = (twice.rate or 0.0) - now
    if gain >= FLAT_POINTS:
        return f"{twice.label} the capacity ({twice.capacity}) would add {numbers.points(gain)} of hits."
    if half is not None and now - (half.rate or 0.0) < FLAT_POINTS:
        return f"Capacity is not the limit: {half.label} of it would hit {half.text} as well."
    return f"More capacity would add next to nothing: {numbers.points(gain)} at {twice.label}."
