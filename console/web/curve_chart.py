"""The what-if curve as a plotly.js figure, and as CSV. Drawing only."""

from __future__ import annotations

import csv
import io
from typing import Any

from console.viewmodel.curve import Curve
from console.viewmodel.levels import Palette
from console.web.charts import INK
from controlplane.nodes.pool_schemas import PoolReport

HEIGHT = 320
COLOURS: dict[Palette, tuple[str, str]] = {
    "dark": ("#7bb8ff", "#f2b84b"),
    "light": ("#0a5bb5", "#855300"),
}
"""Of the prediction and of what was measured; they differ in shape and words too."""


def curve_figure(curve: Curve, palette: Palette) -> dict[str, Any]:
    """`points` are the read-outs, in the order of the first trace's points."""
    ink = INK[palette]
    predicted, measured = COLOURS[palette]
    places = [point.factor for point in curve.points]
    words = [_words(point.label, point.capacity, point.text, point.difference) for point in curve.points]  # fmt: skip
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines+markers+text", "name": "predicted",
            "x": places, "y": [point.rate for point in curve.points],
            "text": [point.text for point in curve.points], "textposition": "top center",
            "hovertext": words, "hoverinfo": "text", "cliponaxis": False,
            "line": {"color": predicted, "width": 2}, "marker": {"size": 9, "color": predicted},
        },
    ]  # fmt: skip
    if curve.measured is not None:
        traces.append({
            "type": "scatter", "mode": "markers", "name": "measured", "x": [1.0],
            "y": [curve.measured], "hovertext": [f"measured today: {curve.measured_text}"],
            "hoverinfo": "text", "cliponaxis": False,
            "marker": {"size": 14, "symbol": "diamond-open", "color": measured, "line": {"width": 3, "color": measured}},
        })  # fmt: skip
    return {"traces": traces, "layout": _layout(curve, ink, measured), "points": words}


def _words(label: str, capacity: str, rate: str, difference: str) -> str:
    against = "today's capacity" if difference == "now" else f"{difference} against now"
    return f"{label}, {capacity}: {rate} of what the pool is asked for, {against}"


def _layout(curve: Curve, ink: dict[str, str], measured: str) -> dict[str, Any]:
    top = max([p.rate for p in curve.points if p.rate is not None] + [curve.measured or 0.0, 0.1])
    axis = {"zeroline": False, "automargin": True, "tickcolor": ink["muted"], "fixedrange": True}
    return {
        "height": HEIGHT,
        "margin": {"t": 28, "b": 48, "l": 8, "r": 24},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": ink["panel"],
        "font": {"family": "ui-monospace, DejaVu Sans Mono, monospace", "size": 12, "color": ink["text"]},
        "xaxis": {
            **axis, "type": "log", "tickmode": "array", "showgrid": False,
            "tickvals": [p.factor for p in curve.points],
            "ticktext": [f"{p.label}<br>{p.capacity}" for p in curve.points],
        },
        "yaxis": {**axis, "range": [0, min(1.0, top * 1.15)], "tickformat": ".0%", "gridcolor": ink["muted"], "griddash": "dot"},
        "hoverlabel": {"bgcolor": ink["panel"], "bordercolor": ink["muted"], "font": {"color": ink["text"]}},
        "shapes": [{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": measured, "width": 1, "dash": "dash"}}],
        "annotations": [{"x": 0, "y": 1, "yref": "paper", "yanchor": "bottom", "text": f"today, measured {curve.measured_text}", "showarrow": False}],
        "showlegend": False,
        "dragmode": False,
        "uirevision": "what-if",
    }  # fmt: skip


def curve_csv(report: PoolReport) -> str:
    """Raw numbers; the measured rate stands on today's line."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(
        ["capacity_factor", "capacity_bytes", "predicted_hit_ratio", "measured_hit_ratio"]
    )
    for point in report.curve:
        now = report.measured_hit_rate if point.capacity_factor == 1.0 else None
        lines.writerow([
            f"{point.capacity_factor:g}", point.capacity_bytes, *("" if v is None else f"{v:.6g}" for v in (point.hit_rate, now)),
        ])  # fmt: skip
    return out.getvalue()
