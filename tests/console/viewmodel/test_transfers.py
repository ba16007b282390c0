"""The matrix: every pair, its verdict, its worst."""

from __future__ import annotations

from typing import Any

from console.viewmodel.transfers import first_view, is_node_pair, pair_table, transfers
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


class TestNodes:
    def test_nodes_and_workers_are_two_matrices(self, world: Any) -> None:
        pairs = [world.pair("p1", "d1", 0.1), world.node_pair("n1", "n2", 0.2)]
        matrix = Matrix(window_seconds=300, pairs=pairs)
        nodes = [world.node(1, id="n1"), world.node(2, id="n2")]
        found = transfers(matrix, view="nodes", nodes=nodes, workers=world.workers)
        assert [row.key for row in found.rows] == ["n1", "n2"]
        assert found.name == "node_transfers_p99"
        workers = transfers(matrix, view="workers", nodes=nodes)
        assert [(r.key, c.key) for r, c in zip(workers.rows, workers.columns, strict=True)] == [("p1", "d1")]  # fmt: skip

    def test_a_node_reads_its_own_blocks_in_place(self, world: Any) -> None:
        matrix = Matrix(window_seconds=300, pairs=[world.node_pair("n1", "n2", 0.2)])
        found = transfers(matrix, view="nodes")
        own, there = found.rows[0].cells
        assert (own.state, there.state, found.rows[1].cells[0].state) == ("absent", "ok", "no_traffic")  # fmt: skip
        assert "read in place" in own.readout
        assert "P99 200 ms" in there.readout

    def test_bytes_add_up_and_latencies_do_not(self, world: Any) -> None:
        pairs = [world.node_pair("n1", name, 0.2, bytes=3_000_000_000) for name in ("n2", "n3")]
        matrix = Matrix(window_seconds=300, pairs=pairs)
        assert transfers(matrix, view="nodes", value="bytes").rows[0].summary == "20 MB/s"
        assert transfers(matrix, view="nodes", value="p99").rows[0].summary == "200 ms"

    def test_a_value_of_the_other_matrix_falls_back(self, world: Any) -> None:
        assert transfers(None, view="nodes", value="p95").name == "node_transfers_p99"
        assert transfers(None, view="workers", value="p99").name == "transfers_p95"

    def test_e05_a_node_that_is_gone_says_so(self, world: Any) -> None:
        nodes = [world.node(1, id="n1"), world.node(2, id="n2", state="lost")]
        found = transfers(None, view="nodes", nodes=nodes)
        assert [row.label for row in found.rows] == ["n1", "n2 lost"]

    def test_of_many_nodes_those_that_moved_most(self, world: Any) -> None:
        nodes = [world.node(number, id=f"n{number:03}") for number in range(100)]
        matrix = Matrix(window_seconds=300, pairs=[world.node_pair("n098", "n099", 0.1)])
        found = transfers(matrix, view="nodes", nodes=nodes)
        assert (len(found.rows), len(found.columns)) == (64, 64)
        assert {"n098", "n099"} <= {row.key for row in found.rows}
        assert "64 of 100 nodes" in found.title

    def test_one_node_and_no_traffic_are_told_apart(self, world: Any) -> None:
        one = [world.node(1)]
        assert transfers(None, view="nodes", nodes=one).empty.startswith("One node has joined")
        two = [*one, world.node(2)]
        assert transfers(None, view="nodes", nodes=two).empty.startswith("No KV has travelled")
        assert (first_view(one), first_view(two)) == ("workers", "nodes")

    def test_which_kind_of_pair_a_name_is(self, world: Any) -> None:
        nodes = [world.node(1, id="n1"), world.node(2, id="n2")]
        matrix = Matrix(window_seconds=300, pairs=[world.pair("n1", "d1", 0.1)])
        assert is_node_pair("n1", "n2", matrix, nodes)
        assert not is_node_pair("n1", "d1", matrix, nodes)
        assert not is_node_pair("p1", "d1", None, nodes)

    def test_pairs_of_nodes_open_their_page(self, world: Any) -> None:
        matrix = Matrix(window_seconds=300, pairs=[world.node_pair("n1", "n2", 2.61, failures=2)])
        (row,) = pair_table(matrix, "nodes").rows
        assert row.opens == "transfers/n1/n2"
        assert [text.text for text in row.cells[5:]] == ["2.61 s!", "384 MB/s", "2"]
