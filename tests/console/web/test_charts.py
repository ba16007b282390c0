"""Figures: what plotly is handed is valid, stepped, and says what the view model says."""

from __future__ import annotations

import warnings
from dataclasses import replace
from datetime import UTC
from types import SimpleNamespace
from typing import Any

import pytest

from console.viewmodel import cache, transfers
from console.viewmodel.cache import TimeAxis
from console.viewmodel.heatmap import Heatmap, without_value
from console.viewmodel.levels import TRUECOLOR
from console.web.charts import figure_of, spark, stepped_colorscale, strongest, verdict_of
from controlplane.stats.schemas import Matrix, Pair, Series, SeriesReply


def plotly_figure(data: list[dict[str, Any]], layout: dict[str, Any]) -> Any:
    """Raises ValueError for any property or value that plotly does not know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import plotly.graph_objects as go  # noqa: PLC0415 - slow to import, needed here alone

    return go.Figure(data=data, layout=layout)


@pytest.fixture
def hit_rate(made: SimpleNamespace) -> Heatmap:
    """Two nodes over 60 s: one at 40 %, one that has said nothing and joined half way."""
    step, num = 10.0, 7
    start = (made.AT // step - num + 1) * step
    values: dict[str, list[float | None]] = {
        "prompt_tokens": [100.0, 100.0, 0.0, None, 100.0, 100.0, 100.0],
        "hit_tokens": [40.0, 97.0, 0.0, None, 20.0, 60.0, 60.0],
    }
    series = [
        Series(metric=metric, source="node:n1", values=line) for metric, line in values.items()
    ]
    reply = SeriesReply(start=start, step_seconds=step, series=series)
    nodes = [made.node("n1"), made.bare_node("n2")]
    return cache.hit_rate(reply, nodes, TimeAxis(made.AT, UTC, 60.0, 6))


@pytest.fixture
def matrix() -> Heatmap:
    """Two sources, two destinations, one pair without traffic."""
    fields = {"path": "shm", "transfers": 3, "bytes": 3_000_000, "seconds": 0.3}
    pairs = [
        Pair(source="p1", destination="d1", p95_seconds=2.84, **fields),
        Pair(source="p2", destination="d1", p95_seconds=0.02, **fields),
        Pair(source="p1", destination="d2", p95_seconds=0.02, **fields),
    ]
    return transfers.transfers(Matrix(window_seconds=300, pairs=pairs))


class TestFigure:
    @pytest.mark.parametrize("palette", ["dark", "light"])
    @pytest.mark.parametrize("name", ["hit_rate", "matrix"])
    def test_plotly_accepts_it(
        self, name: str, palette: Any, request: pytest.FixtureRequest
    ) -> None:
        heat = request.getfixturevalue(name)
        figure = figure_of(heat, palette, {heat.columns[0].key: "P"})
        drawn = plotly_figure(list(figure.traces), figure.layout)
        assert len(drawn.data) == (2 if heat.axis == "time" else 1)

    def test_levels_come_from_the_view_model_and_never_rescale(self, hit_rate: Heatmap) -> None:
        figure = figure_of(hit_rate, "dark")
        closed, last = figure.traces
        levels = [[*left, *right] for left, right in zip(closed["z"], last["z"], strict=True)]
        assert levels == [[cell.level for cell in row.cells] for row in hit_rate.rows]
        assert (closed["zauto"], closed["zmin"], closed["zmax"]) == (False, -0.5, 7.5)

    def test_each_level_has_one_flat_colour(self) -> None:
        scale = stepped_colorscale("dark")
        assert [colour for _, colour in scale[::2]] == list(TRUECOLOR["dark"])
        assert [colour for _, colour in scale[1::2]] == list(TRUECOLOR["dark"])
        assert [edge for edge, _ in scale[1:-1:2]] == [edge for edge, _ in scale[2::2]]
        assert (scale[0][0], scale[-1][0]) == (0, 1)

    def test_gaps_have_no_value_and_say_why(self, hit_rate: Heatmap) -> None:
        closed = figure_of(hit_rate, "dark").traces[0]
        gaps = [place for place, level in enumerate(closed["z"][0]) if level is None]
        texts = [closed["text"][0][place] for place in gaps]
        hovers = [closed["hovertext"][0][place] for place in gaps]
        assert texts == ["-", "/"]
        assert "no traffic" in hovers[0]
        assert "no data" in hovers[1]

    def test_among_many_columns_no_data_is_the_bare_hatch(self, made: SimpleNamespace) -> None:
        reply = SeriesReply(start=made.AT, step_seconds=10, series=[])
        axis = TimeAxis(made.AT, UTC, 900.0, 90)
        heat = cache.hit_rate(reply, [made.node("n1")], axis)
        closed = figure_of(heat, "dark").traces[0]
        assert set(closed["text"][0]) == {""}
        assert all("no data" in text for text in closed["hovertext"][0])

    def test_a_row_that_did_not_exist_is_blank_and_not_hatched(self, hit_rate: Heatmap) -> None:
        figure = figure_of(hit_rate, "dark")
        blank = [shape for shape in figure.layout["shapes"] if shape["type"] == "rect"]
        assert [(shape["y0"], shape["y1"]) for shape in blank] == [(0.5, 1.5)]

    def test_values_between_two_absences_stay_in_sight(self, hit_rate: Heatmap) -> None:
        row = hit_rate.rows[0]
        gone = without_value("absent", "n1")
        cells = (gone, *row.cells[1:-1], gone)
        heat = replace(hit_rate, rows=(replace(row, cells=cells), *hit_rate.rows[1:]))
        blank = [s for s in figure_of(heat, "dark").layout["shapes"] if s.get("y0") == -0.5]
        widths = [shape["x1"] - shape["x0"] for shape in blank]
        assert widths == [10.0, 10.0]

    def test_a_breach_carries_a_sign_beside_its_colour(self, hit_rate: Heatmap) -> None:
        closed = figure_of(hit_rate, "dark").traces[0]
        for cell, text in zip(hit_rate.rows[0].cells, closed["text"][0], strict=False):
            assert ("!" in text) == cell.breach

    def test_an_update_carries_the_open_column_alone(self, hit_rate: Heatmap) -> None:
        figure = figure_of(hit_rate, "dark")
        assert set(figure.update("")) == {"closed_key", "traces", "layout", "rows"}
        update = figure.update(figure.closed_key)
        assert set(update) == {"closed_key", "open"}
        assert [len(row) for row in update["open"]["z"]] == [1, 1]

    def test_columns_touch_and_the_zoom_survives_updates(self, hit_rate: Heatmap) -> None:
        figure = figure_of(hit_rate, "dark")
        closed, last = figure.traces
        assert closed["x"][-1] == last["x"][0]
        assert len(closed["x"]) == len(closed["z"][0]) + 1
        assert figure.layout["uirevision"] == "hit_rate"

    def test_a_matrix_cell_shows_its_number(self, matrix: Heatmap) -> None:
        (trace,) = figure_of(matrix, "light").traces
        assert trace["text"] == [["2.84 s !", "20 ms"], ["20 ms", "-"]]

    def test_nothing_at_all_is_still_a_figure(self) -> None:
        heat = transfers.transfers(None)
        figure = figure_of(heat, "dark")
        plotly_figure(list(figure.traces), figure.layout)
        assert verdict_of(heat) == "No KV has travelled in this window."


class TestWords:
    def test_the_verdict_names_the_lowest_cell(self, hit_rate: Heatmap) -> None:
        assert verdict_of(hit_rate).startswith("Past the alarm: n1 ")
        assert "20.0 %" in verdict_of(hit_rate)

    def test_the_strongest_come_first_by_value(self, hit_rate: Heatmap) -> None:
        values = [cell.value for _, _, cell in strongest(hit_rate, 3)]
        assert values == [0.2, 0.6, 0.6]


class TestSpark:
    def test_a_gap_splits_the_line(self) -> None:
        line = spark([1.0, 2.0, None, 3.0, 4.0], None)
        assert len(line.pieces) == 2
        assert line.limit is None

    def test_a_lone_point_is_a_dot(self) -> None:
        assert spark([None, 5.0, None]).dots == ((50.0, 2.0),)

    def test_all_zero_is_flat_at_the_bottom(self) -> None:
        (piece,) = spark([0.0, 0.0]).pieces
        assert piece == "0,26 100,26"

    def test_the_scale_reaches_to_the_limit(self) -> None:
        line = spark([1.0, 1.0], 2.0)
        assert line.limit == 2.0
        assert line.pieces == ("0,14 100,14",)

    def test_nothing_known_draws_nothing(self) -> None:
        line = spark([None, None])
        assert (line.pieces, line.dots) == ((), ())
