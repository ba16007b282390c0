"""The overload bench: its load, how it counts, and a short run of the whole."""

from __future__ import annotations

import json
from collections import Counter
from statistics import mean
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from controlplane.bench import overload_load
from controlplane.bench.commands import register
from controlplane.bench.overload import Overload, run_overload_bench
from controlplane.bench.overload_load import CLASSES, TENANTS, Seen, Shape, Tally, arrivals, send


def test_the_load_is_what_capacity_is_reckoned_with() -> None:
    bench = Overload()
    load = arrivals(bench.shape, bench.factor * bench.capacity, 200.0, seed=3)
    assert len(load) / 200 == pytest.approx(1.5 * 16, rel=0.05)
    assert mean(one.num_tokens for one in load) == pytest.approx(bench.shape.mean_tokens, rel=0.05)
    assert load == arrivals(bench.shape, bench.factor * bench.capacity, 200.0, seed=3)
    assert {one.priority for one in load} == {"standard"}


def test_mixed_loads_have_their_shares() -> None:
    load = arrivals(Shape(classes=CLASSES, tenants=TENANTS), 20.0, 200.0, seed=3)
    for shares, counted in (
        (CLASSES, Counter(one.priority for one in load)),
        (TENANTS, Counter(one.tenant for one in load)),
    ):
        for name, share in shares:
            assert counted[name] / len(load) == pytest.approx(share, abs=0.03)


def test_goodput_is_what_clients_saw_in_time() -> None:
    tally = Tally()
    for seen in (
        Seen("c", "t", 200, 1.9, 0.01), Seen("c", "t", 200, 2.1, 0.01), Seen("c", "t", 200, 1.0, 3.0),
        Seen("c", "t", 429), Seen("c", "t", 503), Seen("c", "t", 0), Seen("c", "t", 200, 0.5),
    ):  # fmt: skip
        tally.add(seen, max_ttft=2.0, max_tbt=1.0)
    counted = (tally.within_slo, tally.late, tally.rejected, tally.failed)
    assert counted == (2, 2, 1, 2)
    assert tally.requests == sum(counted)


async def test_a_gateway_that_is_not_there_is_a_failed_request() -> None:
    (one, *_) = arrivals(Shape(), 10.0, 2.0, seed=1)
    assert (await send(1, one, Shape())).status == 0


def run_short(monkeypatch: pytest.MonkeyPatch, seconds: float) -> dict[str, Any]:
    monkeypatch.setattr("controlplane.bench.overload.WARM_UP_SECONDS", seconds / 4)
    bench = Overload(seconds=seconds, factor=3.0, prefill_workers=4, max_ttft_seconds=3.0)
    result = run_overload_bench(bench)
    off, enforce = result["off"], result["enforce"]
    assert off["requests"] == enforce["requests"] == result["requests"]
    assert off["rejected"] == 0
    assert enforce["failed"] == 0
    assert result["false_rejects"]["samples"] >= 0
    return result


@pytest.mark.heavy
@pytest.mark.xdist_group("processes")
def test_both_modes_meet_the_same_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole bench, too short for a verdict."""
    assert run_short(monkeypatch, 4.0)["requests"] > 10


@pytest.mark.soak
def test_enforce_beats_off_beyond_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio that counts comes from a long run on a quiet machine."""
    result = run_short(monkeypatch, 24.0)
    assert result["requests"] > 50
    assert result["enforce"]["rejected"] > 0
    assert result["goodput_ratio"] > 1.0


def test_the_verb_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Overload] = []

    def run(bench: Overload) -> dict[str, object]:
        given.append(bench)
        return {"goodput_ratio": 2.0}

    monkeypatch.setattr("controlplane.bench.overload.run_overload_bench", run)
    app = typer.Typer()
    register(app)
    options = ["bench", "overload", "--json", "--mixed", "--seconds", "5", "--percentile", "90"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"goodput_ratio": 2.0}
    assert (given[0].seconds, given[0].percentile) == (5, 90)
    assert given[0].shape.classes == overload_load.CLASSES
