"""Heatmaps of the view model as plotly.js figures. Drawing only: values, levels and words come in.

A figure over time has two traces, the closed columns and the open one: the closed ones change once
a bucket, so a browser that holds them is sent the open column alone (`Figure.update`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from console.viewmodel.heatmap import Cell, HeatColumn, Heatmap, HeatRow
from console.viewmodel.levels import NUM_LEVELS, TRUECOLOR, Palette

from .links import page_of

Json = dict[str, Any]
INK: dict[Palette, dict[str, str]] = {
    "dark": {"page": "#0f1419", "panel": "#171d24", "text": "#e6e9ec", "muted": "#a3adb8"},
    "light": {"page": "#ffffff", "panel": "#f4f6f8", "text": "#1b2229", "muted": "#55606b"},
}
MAX_TICKS = 8
SUM_ROW = "all"
TICK_STEPS_SECONDS = (10, 30, 60, 120, 180, 300, 600, 900, 1800, 3600, 7200, 10800, 21600)
TEXT_IN_CELLS_UP_TO = 16  # columns: beyond it a cell is too narrow for its number
MAX_SIGNS = 1024
FEW = 6
"""Up to so many rows and columns a matrix is drawn smaller than the page is wide."""
MARGIN_TOP, MARGIN_BOTTOM = 8, 40
EVENT_WORDS = {
    "P": "policy changed",
    "R": "worker restarted",
    "D": "drained or resumed",
    "J": "node joined",
    "L": "node lost",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """What the browser draws. `closed_key` names the content of all traces but the open one."""

    closed_key: str
    traces: tuple[Json, ...]
    layout: Json
    rows: tuple[Json, ...]

    def full(self) -> Json:
        """Everything."""
        return {
            "closed_key": self.closed_key,
            "traces": list(self.traces),
            "layout": self.layout,
            "rows": list(self.rows),
        }

    def update(self, held: str) -> Json:
        """Only the open column, when the browser holds the closed ones of `held`."""
        if held != self.closed_key or len(self.traces) < 2:
            return self.full()
        return {"closed_key": self.closed_key, "open": self.traces[1]}


def figure_of(
    heatmap: Heatmap, palette: Palette, events: Mapping[str, str] | None = None
) -> Figure:
    """Rows from top to bottom as the view model orders them; columns from left to right.

    `events` are the letters of `viewmodel.marks`, by column key.
    """
    split = _first_open(heatmap.columns)
    traces = [_trace(heatmap, palette, 0, split)]
    if split < len(heatmap.columns):
        traces.append(_trace(heatmap, palette, split, len(heatmap.columns)))
    layout = _layout(heatmap, palette)
    happened = _events(heatmap, events or {}, INK[palette]["muted"])
    layout["shapes"] += [line for line, _ in happened]
    layout["annotations"] = [*(letter for _, letter in happened), *_signs(heatmap)]
    rows = tuple(_row_head(row) for row in heatmap.rows)
    key = hashlib.sha256(repr((traces[0], layout, rows)).encode()).hexdigest()[:16]
    return Figure(key, tuple(traces), layout, rows)


def stepped_colorscale(palette: Palette) -> list[list[float | str]]:
    """Eight flat steps; with zmin -0.5 and zmax 7.5 level n falls into the middle of step n."""
    colours = TRUECOLOR[palette]
    return [
        [edge / NUM_LEVELS, colours[level]]
        for level in range(NUM_LEVELS)
        for edge in (level, level + 1)
    ]


def cell_text(cell: Cell, *, wide: bool) -> str:
    """What stands inside a cell: its number where there is room, else only what warns.

    No data is the bare hatch where cells are many; every other gap carries its sign.
    """
    if cell.level is None:
        return cell.glyph if wide or cell.state != "no_data" else ""
    if wide:
        return f"{cell.text}{' !' if cell.breach else ''}"
    return "!" if cell.breach else cell.mark


def _first_open(columns: Sequence[HeatColumn]) -> int:
    for place, column in enumerate(columns):
        if column.is_open:
            return place
    return len(columns)


def _trace(heatmap: Heatmap, palette: Palette, first: int, last: int) -> Json:
    wide = len(heatmap.columns) <= TEXT_IN_CELLS_UP_TO
    parts = [row.cells[first:last] for row in heatmap.rows]
    return {
        "type": "heatmap",
        "name": heatmap.name,
        "x": _edges(heatmap, first, last),
        "y": [place - 0.5 for place in range(len(heatmap.rows) + 1)],
        "z": [[cell.level for cell in cells] for cells in parts],
        "text": [[cell_text(cell, wide=wide) for cell in cells] for cells in parts],
        "texttemplate": "%{text}",
        "hovertext": [[cell.readout for cell in cells] for cells in parts],
        "hoverinfo": "text",
        "hoverongaps": True,
        "zauto": False,
        "zmin": -0.5,
        "zmax": NUM_LEVELS - 0.5,
        "colorscale": stepped_colorscale(palette),
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
    }


def _edges(heatmap: Heatmap, first: int, last: int) -> list[float]:
    """Edges of the columns: seconds since the epoch, or places in a matrix."""
    columns = heatmap.columns[first:last]
    if heatmap.axis == "matrix" or any(c.start is None or c.end is None for c in columns):
        return [place - 0.5 for place in range(first, last + 1)]
    starts = [column.start or 0.0 for column in columns]
    return [*starts, columns[-1].end or 0.0] if columns else []


def _layout(heatmap: Heatmap, palette: Palette) -> Json:
    ink = INK[palette]
    num_rows = max(1, len(heatmap.rows))
    return {
        "height": MARGIN_TOP + MARGIN_BOTTOM + num_rows * _row_height(heatmap),
        "margin": {"t": MARGIN_TOP, "b": MARGIN_BOTTOM, "l": 8, "r": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "ui-monospace, DejaVu Sans Mono, monospace", "size": 12, "color": ink["text"]},
        "xaxis": {**_axis(ink), **_x_ticks(heatmap)},
        "yaxis": {**_axis(ink), **_y_ticks(heatmap), "fixedrange": True, "tickfont": {"size": min(12, _row_height(heatmap) - 2)}},
        "hoverlabel": {"bgcolor": ink["panel"], "bordercolor": ink["muted"], "font": {"color": ink["text"]}, "align": "left"},
        "dragmode": "zoom",
        "shapes": _absent_shapes(heatmap, ink["panel"]),
        "showlegend": False,
        "uirevision": heatmap.name,
    }  # fmt: skip


def _signs(heatmap: Heatmap) -> list[Json]:
    """`-` and `~` in a matrix: plotly.js writes no text where there is no value."""
    if heatmap.axis != "matrix":
        return []
    return [
        {"x": column, "y": place, "text": cell.glyph, "showarrow": False, "hovertext": cell.readout}
        for place, row in enumerate(heatmap.rows)
        for column, cell in enumerate(row.cells)
        if cell.state in ("no_traffic", "stale")
    ][:MAX_SIGNS]


def _absent_shapes(heatmap: Heatmap, colour: str) -> list[Json]:
    """Blank where a row did not exist yet, and where there is no traffic in a matrix: the hatch
    behind a gap would claim that data is missing."""
    blank = ("absent", "no_traffic") if heatmap.axis == "matrix" else ("absent",)
    edges = _edges(heatmap, 0, len(heatmap.columns))
    return [
        {
            "type": "rect",
            "x0": edges[first],
            "x1": edges[last],
            "y0": place - 0.5,
            "y1": place + 0.5,
            "fillcolor": colour,
            "line": {"width": 0},
        }
        for place, row in enumerate(heatmap.rows)
        for first, last in _runs(row, blank)
    ]


def _runs(row: HeatRow, states: Sequence[str]) -> list[tuple[int, int]]:
    """Half-open ranges of columns; what stands between two of them stays in sight."""
    runs: list[tuple[int, int]] = []
    for place, cell in enumerate(row.cells):
        if cell.state not in states:
            continue
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def _events(heatmap: Heatmap, events: Mapping[str, str], colour: str) -> list[tuple[Json, Json]]:
    """A thin line and its letter under the axis, the words on hover."""
    found = []
    for column in heatmap.columns:
        letter = events.get(column.key)
        if letter:
            at = _middle(column)
            line = {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1}
            words = EVENT_WORDS.get(letter, f"{letter} events")
            note = {
                "x": at,
                "y": 0,
                "yref": "paper",
                "yanchor": "top",
                "yshift": -20,
                "text": letter,
                "hovertext": f"{column.label} {words}",
                "showarrow": False,
            }
            found.append(({**line, "line": {"color": colour, "width": 1, "dash": "dot"}}, note))
    return found


def _axis(ink: dict[str, str]) -> Json:
    return {
        "type": "linear",
        "showgrid": False,
        "zeroline": False,
        "automargin": True,
        "tickmode": "array",
        "tickangle": 0,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": ink["muted"],
        "title": {"text": ""},
    }


def _row_height(heatmap: Heatmap) -> int:
    """Square-like cells in a small matrix, thinner rows when there are many."""
    if heatmap.axis == "matrix" and len(heatmap.rows) <= FEW:
        return 56
    if heatmap.axis == "matrix" and len(heatmap.rows) <= TEXT_IN_CELLS_UP_TO:
        return 38
    return 26 if len(heatmap.rows) <= 20 else 11


def _x_ticks(heatmap: Heatmap) -> Json:
    if heatmap.axis == "matrix":
        places = range(len(heatmap.columns))
        return {
            "tickvals": list(places),
            "ticktext": [column.label for column in heatmap.columns],
            "range": [-0.5, len(heatmap.columns) - 0.5],
        }
    shown = _round_columns(heatmap.columns)
    open_ones = [c for c in heatmap.columns if c.is_open]
    ends = [heatmap.columns[0].start, heatmap.columns[-1].end] if heatmap.columns else [0, 1]
    return {
        "tickvals": [c.start for c in shown] + [_middle(c) for c in open_ones],
        "ticktext": [c.label for c in shown] + ["<" for _ in open_ones],
        "range": ends,
    }


def _round_columns(columns: Sequence[HeatColumn]) -> list[HeatColumn]:
    """Columns that begin at a round time: labels stay with their moment as the figure shifts."""
    closed = [c for c in columns if c.start is not None and not c.is_open]
    if not closed:
        return []
    span = (closed[-1].start or 0.0) - (closed[0].start or 0.0)
    step = next((s for s in TICK_STEPS_SECONDS if span / s <= MAX_TICKS), TICK_STEPS_SECONDS[-1])
    last = (closed[-1].end or 0.0) - span / (2 * MAX_TICKS)  # room for the open column's mark
    return [c for c in closed if (c.start or 0.0) % step == 0 and (c.start or 0.0) <= last]


def _middle(column: HeatColumn) -> float:
    return ((column.start or 0.0) + (column.end or 0.0)) / 2


def _y_ticks(heatmap: Heatmap) -> Json:
    return {
        "tickvals": list(range(len(heatmap.rows))),
        "ticktext": [_row_label(row) for row in heatmap.rows],
        "range": [len(heatmap.rows) - 0.5, -0.5],
    }


def _row_label(row: HeatRow) -> str:
    return f"{row.label}{' !' if row.breach else ''}  {row.summary}".rstrip()


def _row_head(row: HeatRow) -> Json:
    return {"key": row.key, "label": row.label, "href": page_of(row.opens)}


def verdict_of(heatmap: Heatmap) -> str:
    """One sentence in place of the picture."""
    if heatmap.empty:
        return heatmap.empty
    if heatmap.verdict:
        return f"{heatmap.verdict[0].upper()}{heatmap.verdict[1:]}."
    first = strongest(heatmap, 1)
    if not first:
        return "No cell stands out in this window."
    cell = first[0][2]
    if cell.breach:
        return f"Past the alarm: {cell.readout}."
    return f"Nothing is past an alarm. Strongest cell: {cell.readout}."


def strongest(heatmap: Heatmap, count: int) -> list[tuple[HeatRow, HeatColumn, Cell]]:
    """The cells to look at first: by level, then by value in the direction of ink.

    The weakest level never stands out, and a sum over rows hides no row.
    """
    sign = 1 if heatmap.scale.low_is_strong else -1
    cells = [
        (row, column, cell)
        for row, column, cell in heatmap.worst(len(heatmap.rows) * len(heatmap.columns))
        if cell.level and row.key != SUM_ROW
    ]
    cells.sort(key=lambda item: (-(item[2].level or 0), sign * (item[2].value or 0)))
    return cells[:count]


@dataclass(frozen=True, slots=True)
class Spark:
    """A lone series in a 100 x 28 box: pieces between gaps, points alone, the limit's height."""

    pieces: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    limit: float | None


SPARK_WIDTH, SPARK_HEIGHT, SPARK_PAD = 100.0, 28.0, 2.0


def spark(values: Sequence[float | None], ceiling: float | None = None) -> Spark:
    """On a scale from 0 to the larger of the limit and the maximum; a gap is a gap."""
    seen = [value for value in values if value is not None]
    top = max([*seen, ceiling or 0.0], default=0.0) or 1.0
    step = SPARK_WIDTH / max(1, len(values) - 1)
    pieces: list[list[tuple[float, float]]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((round(place * step, 1), _spark_y(value, top)))
    return Spark(
        tuple(" ".join(f"{x:g},{y:g}" for x, y in piece) for piece in pieces if len(piece) > 1),
        tuple(piece[0] for piece in pieces if len(piece) == 1),
        None if not ceiling else _spark_y(ceiling, top),
    )


def _spark_y(value: float, top: float) -> float:
    room = SPARK_HEIGHT - 2 * SPARK_PAD
    return round(SPARK_HEIGHT - SPARK_PAD - max(0.0, value) / top * room, 1)
