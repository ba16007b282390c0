"""Templates: what they may call, and how a page becomes HTML."""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from console.viewmodel import numbers
from console.viewmodel.heatmap import HeatColumn, Heatmap, HeatRow
from console.viewmodel.levels import GLYPHS
from console.viewmodel.requests import Bar
from console.viewmodel.sparkline import sparkline
from console.viewmodel.words import HELP

from .assets import Assets
from .charts import FEW, spark, strongest, verdict_of
from .frame import NAV, Frame
from .links import cell_page, head_place, page_of, path
from .pages.base import Page
from .pages.pool import without
from .viewer import WINDOWS_SECONDS, Viewer

TEMPLATES = Path(__file__).parent / "templates"
THINNEST_BAR = 3.0
PLAIN_COLUMNS = frozenset({"state", "status", "at", "why"})
"""Columns whose values say what they are: on a card they stand without their label."""


class Renderer:
    """Owns the template environment; `html` is the only thing that draws."""

    def __init__(self, assets: Assets) -> None:
        self._env = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._env.globals.update(
            asset=assets.url,
            bar_width=bar_width,
            bars=lambda values, ceiling: sparkline(values, ceiling=ceiling),
            cell_href=cell_href,
            cell_page=cell_page,
            column_keys=column_keys,
            few=FEW,
            glyphs=GLYPHS,
            head_place=head_place,
            nav=NAV,
            page_of=page_of,
            plain_columns=PLAIN_COLUMNS,
            spark_of=spark,
            strongest=strongest,
            verdict_of=verdict_of,
            window_after=window_after,
            window_choices=WINDOWS_SECONDS,
            window_text=numbers.window,
            without=without,
            words=HELP,
        )

    def html(self, page: Page, frame: Frame, viewer: Viewer, *, part: bool = False) -> bytes:
        """The whole page, or the part of it that changes: header and main."""
        text = self._env.get_template(page.template).render(
            **page.data,
            page=page,
            part=part,
            frame=frame,
            viewer=viewer,
            here=viewer.path,
            zone=viewer.tz,
        )
        return text.encode()


def bar_width(bar: Bar) -> float:
    """Of 1000; a measured phase is never invisible."""
    if bar.start is None or bar.end is None:
        return 0.0
    return max(THINNEST_BAR, (bar.end - bar.start) * 1000)


def column_keys(heatmap: Heatmap) -> str:
    """For the script that opens a matrix cell's pair."""
    return json.dumps([column.key for column in heatmap.columns])


def cell_href(heatmap: Heatmap, row: HeatRow, column: HeatColumn) -> str:
    """A matrix cell opens its pair, a cell over time its row."""
    if heatmap.axis == "matrix":
        return path("transfers", row.key, column.key)
    return page_of(row.opens)


def window_after(window: int) -> int:
    """The next of the windows, round about."""
    place = WINDOWS_SECONDS.index(window)
    return WINDOWS_SECONDS[(place + 1) % len(WINDOWS_SECONDS)]
