"""Hit rate and evictions over time: null, zero, restart, absent and stale are told apart."""

from __future__ import annotations

from datetime import UTC, timedelta
from typing import Any

from console.viewmodel.cache import TimeAxis, evictions, hit_rate, tiers
from console.viewmodel.heatmap import Heatmap
from controlplane.stats.schemas import Series, SeriesReply

NUM = 6


def make(
    world: Any, asked: list[float | None], hits: list[float | None], **node: object
) -> Heatmap:
    marks = node.pop("marks", [])
    one = world.node(1, **node)
    start = world.now - (NUM - 1) * 10
    series = SeriesReply(
        start=start,
        step_seconds=10,
        series=[
            Series(metric="prompt_tokens", source="node:node-01", values=asked, marks=marks),
            Series(metric="hit_tokens", source="node:node-01", values=hits),
        ],
    )
    axis = TimeAxis(now=world.now + 3, tz=UTC, window_seconds=60, num_columns=60)
    return hit_rate(series, [one], axis)


def row(heatmap: Heatmap) -> list[tuple[str, str]]:
    return [(cell.state, cell.text) for cell in heatmap.rows[0].cells]


def test_values_have_numerator_denominator_and_a_read_out(world: Any) -> None:
    heatmap = make(world, [100.0] * 6, [40.8] * 6)
    cell = heatmap.rows[0].cells[0]
    assert (cell.value, cell.level, cell.breach) == (0.408, 5, True)
    assert (cell.numerator, cell.denominator) == (40.8, 100.0)
    assert "40.8 %  41 of 100 tokens" in cell.readout
    assert heatmap.rows[0].summary == "40.8"


def test_e07_zero_requests_is_no_traffic_and_no_alarm(world: Any) -> None:
    heatmap = make(world, [0.0] * 6, [0.0] * 6)
    assert row(heatmap) == [("no_traffic", "-")] * 6
    assert not heatmap.rows[0].breach
    assert heatmap.rows[0].summary == "-"
    assert heatmap.empty == "No lookups in this window: hit rate has no value (not 0 %)."


def test_null_is_no_data_and_a_zero_hit_is_a_value(world: Any) -> None:
    heatmap = make(world, [None, 100.0, 100.0, 100.0, 100.0, 100.0], [None, 0.0, 1, 1, 1, None])
    states = [cell.state for cell in heatmap.rows[0].cells]
    assert states == ["no_data", "ok", "ok", "ok", "ok", "no_data"]
    assert heatmap.rows[0].cells[1].value == 0.0
    assert heatmap.rows[0].cells[1].level == 7


def test_e06_a_restart_is_a_gap_with_a_mark(world: Any) -> None:
    heatmap = make(world, [100.0, None] + [100.0] * 4, [50.0, None] + [50.0] * 4, marks=["", "R"])
    cell = heatmap.rows[0].cells[1]
    assert (cell.state, cell.mark, cell.value) == ("no_data", "R", None)
    assert "counter restarted" in cell.readout


def test_before_it_joined_a_node_did_not_exist(world: Any) -> None:
    heatmap = make(
        world,
        [None] * 3 + [10.0] * 3,
        [None] * 3 + [5.0] * 3,
        joined_at=world.at - timedelta(seconds=20),
    )
    assert [c.state for c in heatmap.rows[0].cells] == ["absent"] * 3 + ["ok"] * 3


def test_a_node_that_joined_again_existed_before(world: Any) -> None:
    heatmap = make(
        world,
        [None, 10.0, 10.0, None, None, 10.0],
        [None, 5.0, 5.0, None, None, 5.0],
        joined_at=world.at - timedelta(seconds=5),
    )
    assert [c.state for c in heatmap.rows[0].cells] == [
        "absent", "ok", "ok", "no_data", "no_data", "ok",
    ]  # fmt: skip


def test_e05_after_its_last_heartbeat_a_lost_node_is_stale(world: Any) -> None:
    heatmap = make(
        world, [10.0] * 3 + [None] * 3, [5.0] * 3 + [None] * 3,
        state="lost", last_heartbeat_at=world.at - timedelta(seconds=21),
    )  # fmt: skip
    assert [c.state for c in heatmap.rows[0].cells] == ["ok"] * 3 + ["stale"] * 3


def test_json_keeps_null_beside_the_state(world: Any) -> None:
    cells = make(world, [None] * 6, [None] * 6).to_json()["rows"][0]["cells"]  # type: ignore[index]
    assert cells[0]["value"] is None
    assert cells[0]["state"] == "no_data"


def test_columns_are_aligned_and_the_last_is_open(world: Any) -> None:
    heatmap = make(world, [1.0] * 6, [1.0] * 6)
    assert [column.is_open for column in heatmap.columns] == [False] * 5 + [True]
    assert all(column.start is not None and column.start % 10 == 0 for column in heatmap.columns)


def test_evictions_add_up_over_nodes_per_second(world: Any) -> None:
    start = world.now - 50
    series = [
        Series(metric="evicted_capacity", source=f"node:{n}", values=[20.0] * 5 + [None])
        for n in ("a", "b")
    ]
    reply = SeriesReply(start=start, step_seconds=10, series=series)
    axis = TimeAxis(now=world.now + 3, tz=UTC, window_seconds=60, num_columns=60)
    heatmap = evictions(reply, axis)
    capacity, corrupt = heatmap.rows[0], heatmap.rows[1]
    assert capacity.cells[0].value == 4.0
    assert capacity.cells[0].text == "4.0/s"
    assert capacity.cells[5].state == "no_data"
    assert capacity.summary == "200"
    assert {cell.state for cell in corrupt.cells} == {"no_data"}
    assert corrupt.summary == "--"


def test_e03_a_node_without_numbers_leaves_the_others_alone(world: Any) -> None:
    empty = dict.fromkeys(
        ("used_blocks", "capacity_blocks", "pinned_blocks", "block_bytes", "write_queue_blocks", "write_queue_bound")
    )  # fmt: skip
    table = tiers([world.node(1, **empty), world.node(2)])
    assert [cell.text for cell in table.rows[0].cells][2:7] == ["--", "--", "--", "--", "--"]
    assert table.rows[1].cells[2].text == "141/160 GiB"


def test_e05_a_lost_nodes_numbers_are_marked_old(world: Any) -> None:
    table = tiers([world.node(1, state="lost", heartbeat_age_seconds=60.0)])
    assert table.rows[0].cells[2].text.startswith("~")
    assert table.rows[0].cells[2].tone == "stale"
