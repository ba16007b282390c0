"""The matrix: every pair, its verdict, its worst."""

from __future__ import annotations

from typing import Any

from console.viewmodel.transfers import pair_table, transfers
from controlplane.stats.schemas import Matrix


def test_a_slow_destination_is_named_by_its_column(world: Any) -> None:
    heatmap = transfers(world.matrix, workers=world.workers)
    assert heatmap.verdict == "column d5: 4 of 4 sources slow -> look at the destination"
    assert [row.key for row in heatmap.rows] == ["p1", "p2", "p3", "p4"]
    cell = heatmap.cell("p3", "d5")
    assert cell is not None
    assert (cell.level, cell.breach, cell.text) == (6, True, "2.84 s")
    assert "27 transfers, 0 failed  28.8 GB" in cell.readout
    assert "path shm" in heatmap.title


def test_a_slow_source_is_named_by_its_row(world: Any) -> None:
    pairs = [world.pair("p1", f"d{d}", 3.0) for d in range(4)]
    pairs += [world.pair("p2", f"d{d}", 0.05) for d in range(4)]
    heatmap = transfers(Matrix(window_seconds=300, pairs=pairs))
    assert heatmap.verdict == "row p1: 4 of 4 destinations slow -> look at the source"


def test_one_slow_pair_is_a_single_pair(world: Any) -> None:
    pairs = [
        world.pair(f"p{p}", f"d{d}", 3.0 if p == d == 1 else 0.05) for p in (1, 2) for d in (1, 2)
    ]
    heatmap = transfers(Matrix(window_seconds=300, pairs=pairs))
    assert heatmap.verdict == "single pair p1 -> d1 slow"


def test_e07_no_traffic_is_a_dash_and_no_verdict(world: Any) -> None:
    pairs = [world.pair("p1", "d1", 0.0, transfers=0, bytes=0, p50_seconds=None, p95_seconds=None)]
    heatmap = transfers(Matrix(window_seconds=300, pairs=pairs))
    assert heatmap.rows[0].cells[0].state == "no_traffic"
    assert heatmap.empty == "No KV has travelled in this window."
    assert heatmap.verdict == ""


def test_unknown_latency_is_no_data_not_zero(world: Any) -> None:
    pairs = [world.pair("p1", "d1", 0.0, p50_seconds=None, p95_seconds=None)]
    cell = transfers(Matrix(window_seconds=300, pairs=pairs)).rows[0].cells[0]
    assert (cell.state, cell.value) == ("no_data", None)


def test_blocks_loaded_again_are_traffic_without_a_timed_handover(world: Any) -> None:
    pair = world.pair("p1", "p1", 0.0, transfers=0, p50_seconds=None, p95_seconds=None)
    matrix = Matrix(window_seconds=300, pairs=[pair])
    cell = transfers(matrix).rows[0].cells[0]
    assert (cell.state, "no handover timed" in cell.readout) == ("no_data", True)
    assert transfers(matrix, value="bytes").rows[0].cells[0].state == "ok"


def test_other_values(world: Any) -> None:
    pairs = [world.pair("p1", "d1", 0.1, bytes=30_000_000_000, failures=10)]
    matrix = Matrix(window_seconds=300, pairs=pairs)
    assert transfers(matrix, value="bytes").rows[0].cells[0].text == "100 MB/s"
    failing = transfers(matrix, value="failures").rows[0].cells[0]
    assert (failing.value, failing.breach) == (2.0, True)


def test_hysteresis_between_two_drawings(world: Any) -> None:
    before = transfers(Matrix(window_seconds=300, pairs=[world.pair("p1", "d1", 0.099)]))
    after = Matrix(window_seconds=300, pairs=[world.pair("p1", "d1", 0.102)])
    assert transfers(after).rows[0].cells[0].level == 2
    assert transfers(after, previous=before).rows[0].cells[0].level == 1


def test_pairs_as_rows_slowest_first(world: Any) -> None:
    table = pair_table(world.matrix)
    assert table.rows[0].key == "p3>d5"
    assert table.rows[0].cells[5].text == "2.84 s!"
