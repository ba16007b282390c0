"""Heatmaps as values: the terminal draws glyphs or colours of these cells, the web plots them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from console.viewmodel.levels import ABSENT, GLYPHS, NO_DATA, NO_TRAFFIC, STALE, Scale

CellState = Literal["ok", "no_data", "no_traffic", "stale", "absent"]
GLYPH_OF_STATE: dict[str, str] = {
    "no_data": NO_DATA,
    "no_traffic": NO_TRAFFIC,
    "stale": STALE,
    "absent": ABSENT,
}
WORDS_OF_STATE: dict[str, str] = {
    "no_data": "no data",
    "no_traffic": "no traffic",
    "stale": "stale: nothing heard since",
    "absent": "did not exist yet",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """`value` and `level` are None unless `state` is ok. `mark` R says that a counter restarted."""

    value: float | None
    state: CellState
    level: int | None
    text: str
    readout: str
    numerator: float | None = None
    denominator: float | None = None
    breach: bool = False
    mark: str = ""

    @property
    def glyph(self) -> str:
        """One cell's character: `. : ; + * % # @`, or what says why there is no value."""
        return GLYPH_OF_STATE.get(self.state, "?") if self.level is None else GLYPHS[self.level]


@dataclass(frozen=True, slots=True)
class HeatColumn:
    """A time bucket (`start`, `end` in seconds since the epoch) or a destination."""

    key: str
    label: str
    start: float | None = None
    end: float | None = None
    is_open: bool = False
    span: str = ""  # both ends of the time, for the read-out


@dataclass(frozen=True, slots=True)
class HeatRow:
    """`summary` is the row's value over the whole window."""

    key: str
    label: str
    cells: tuple[Cell, ...]
    summary: str = ""
    breach: bool = False
    opens: str = ""


@dataclass(frozen=True, slots=True)
class Heatmap:
    """A figure. `strong` and `legend` print both ends in words; `empty` why there is none."""

    name: str
    title: str
    axis: Literal["time", "matrix"]
    rows: tuple[HeatRow, ...]
    columns: tuple[HeatColumn, ...]
    scale: Scale
    verdict: str = ""
    empty: str = ""
    totals: tuple[str, ...] = ()  # one a column, where the figure has a bottom line

    @property
    def legend(self) -> str:
        """`strong = low   .>=95 :>=85 ...`."""
        return f"{self.scale.strong}   {self.scale.legend()}"

    def cell(self, row_key: str, column_key: str) -> Cell | None:
        """The cell at these keys."""
        column = next((i for i, c in enumerate(self.columns) if c.key == column_key), None)
        row = next((r for r in self.rows if r.key == row_key), None)
        return None if row is None or column is None else row.cells[column]

    def worst(self, count: int = 10) -> tuple[tuple[HeatRow, HeatColumn, Cell], ...]:
        """The strongest cells, for a table instead of a figure."""
        cells = [
            (row, column, cell)
            for row in self.rows
            for column, cell in zip(self.columns, row.cells, strict=True)
            if cell.level is not None
        ]
        sign = 1.0 if self.scale.low_is_strong else -1.0
        cells.sort(key=lambda item: (sign * (item[2].value or 0.0), item[0].key, item[1].key))
        return tuple(cells[:count])

    def to_json(self) -> dict[str, object]:
        """Null stays null beside its state."""
        return {
            "name": self.name,
            "title": self.title,
            "axis": self.axis,
            "legend": self.legend,
            "verdict": self.verdict,
            "empty": self.empty,
            "columns": [
                {"key": c.key, "label": c.label, "start": c.start, "end": c.end, "open": c.is_open}
                for c in self.columns
            ],
            "rows": [
                {
                    "key": row.key,
                    "label": row.label,
                    "summary": row.summary,
                    "breach": row.breach,
                    "cells": [_cell_json(cell) for cell in row.cells],
                }
                for row in self.rows
            ],
        }


def _cell_json(cell: Cell) -> dict[str, object]:
    return {
        "value": cell.value,
        "state": cell.state,
        "level": cell.level,
        "text": cell.text,
        "readout": cell.readout,
        "numerator": cell.numerator,
        "denominator": cell.denominator,
        "breach": cell.breach,
        "mark": cell.mark,
    }


def valued(
    scale: Scale,
    value: float,
    text: str,
    readout: str,
    *,
    previous: int | None = None,
    numerator: float | None = None,
    denominator: float | None = None,
    mark: str = "",
) -> Cell:
    """A cell that has a value."""
    return Cell(
        value,
        "ok",
        scale.level(value, previous),
        text,
        readout,
        numerator,
        denominator,
        scale.breaches(value),
        mark,
    )


def without_value(state: CellState, readout: str, *, mark: str = "") -> Cell:
    """A cell that has none, and says why."""
    words = WORDS_OF_STATE[state] + (", counter restarted" if mark == "R" else "")
    return Cell(None, state, None, GLYPH_OF_STATE[state], f"{readout}  {words}", mark=mark)


def previous_levels(heatmap: Heatmap | None, keys: Iterable[str]) -> Mapping[tuple[str, str], int]:
    """Levels of the last drawing for the columns named: what hysteresis starts from."""
    if heatmap is None:
        return {}
    wanted = set(keys)
    return {
        (row.key, column.key): cell.level
        for row in heatmap.rows
        for column, cell in zip(heatmap.columns, row.cells, strict=True)
        if column.key in wanted and cell.level is not None
    }
