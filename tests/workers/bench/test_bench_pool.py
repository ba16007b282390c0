"""`perilune bench pool` measures the real thing: its figures are there and of the right kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from workers.bench import commands
from workers.bench.pool_copy import BLOCK_SIZES


@pytest.mark.xdist_group("bench")
def test_figures(tmp_path: Path) -> None:
    app = typer.Typer()
    commands.register(app)
    done = CliRunner().invoke(
        app, ["bench", "pool", "--json", "--rounds", "1", "--ssd-dir", str(tmp_path)]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    figures = json.loads(done.stdout)
    sizes = {str(size) for size in BLOCK_SIZES}
    for name in (
        "shm_over_memcpy", "shm_verified_over_memcpy", "shm_verified_by_layer_over_memcpy",
        "memcpy_gb_per_second",
    ):  # fmt: skip
        assert set(figures[name]) == sizes
        assert all(value > 0 for value in figures[name].values())
    assert 0 < figures["store_p50_us"] <= figures["store_p99_us"]
    assert 0 < figures["load_p50_us"] <= figures["load_p99_us"]
    assert 0 < figures["lookup_500_us"] <= figures["lookup_500_p99_us"]
    assert figures["ssd_over_raw"] > 0
    assert not list(tmp_path.iterdir())
