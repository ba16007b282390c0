"""`perilune bench index` in small; its figures on a quiet machine are the bench's business."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from workers.bench import index
from workers.bench.commands import register
from workers.bench.index_data import make_data

SMALL = ["--blocks", "20000", "--nodes", "8", "--query-blocks", "100", "--queries", "20"]


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    register(app)
    return app


def test_data_is_the_same_for_the_same_seed() -> None:
    one, other = (make_data(5000, 4, 50, 5, seed=3) for _ in range(2))
    assert one == other
    assert one.num_blocks >= 5000
    assert all(len(query) == 50 for query in one.deep_queries)


def test_figures(app: typer.Typer) -> None:
    result = index.run_index_bench(
        num_blocks=20_000, num_nodes=8, query_blocks=100, num_queries=20, seed=7, peer=None
    )
    assert result["blocks"] >= 20_000
    assert (result["nodes"], result["query_blocks"]) == (8, 100)
    assert 0 < result["find_p50_us"] < 10_000
    assert result["entries"] > result["blocks"]
    if result["peer"] is None:
        assert result["find_over_peer"] is None
    else:
        assert result["peer_agrees"]
        assert result["find_over_peer"] > 0
        assert result["apply_over_peer"] > 0


def test_without_the_peer_that_is_asked_for_it_exits_3(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "has_peer", lambda: False)
    runner = CliRunner()
    refused = runner.invoke(app, ["bench", "index", "--json", "--peer", *SMALL])
    assert refused.exit_code == 3
    assert runner.invoke(app, ["bench", "index", "--json", *SMALL]).exit_code == 0
