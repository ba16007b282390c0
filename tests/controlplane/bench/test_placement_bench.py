"""The placement bench: what of a trace it sends, how it counts, and a short run of the whole."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from controlplane.bench.placement import (
    PEER,
    NoPeerError,
    PlacementBench,
    Row,
    report,
    run_placement_bench,
    simulate,
    speed_of,
)
from controlplane.bench.placement_cluster import PEER_PROGRAM, Shape
from controlplane.bench.placement_trace import (
    TOKEN_SCALE,
    ideal_seconds,
    read_slice,
    spread,
    write_tokenizer,
)
from controlplane.core.placement import ALGORITHMS
from workers.core.cost_model import H200_8B
from workers.core.errors import ConfigError


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats of three turns each, ten requests to a tick of 3 s."""
    rng, lines = random.Random(7), []
    for number in range(120):
        session, turn = number % 40, number // 40
        blocks = [1, *(1000 + session * 10 + i for i in range(2 + 3 * turn)), 9000 + number]
        lines.append(json.dumps({
            "timestamp": number // 10 * 3000, "input_length": (len(blocks) - 1) * 512 + 100,
            "output_length": rng.randrange(16, 400), "hash_ids": blocks,
        }))  # fmt: skip
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


class TestTrace:
    def test_prompts_share_what_the_trace_says(self, trace: Path, tmp_path: Path) -> None:
        requests = read_slice(trace, 0, 120)
        first, again = requests[0].prompt.split(), requests[40].prompt.split()
        shared = [a == b for a, b in zip(first, again, strict=False)].index(False)
        assert shared == 3 * 512 // TOKEN_SCALE  # the common block and the session's two
        tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path) / "tokenizer.json"))
        ids = tokenizer.encode(requests[0].prompt).ids
        assert len(ids) == requests[0].prompt_tokens // TOKEN_SCALE
        assert len(set(ids)) > 50

    def test_a_tick_is_strewn_and_the_pace_kept(self, trace: Path) -> None:
        requests = read_slice(trace, 0, 120)
        once, other = spread(requests, 3.0, seed=1), spread(requests, 3.0, seed=2)
        times = [request.at for request in once]
        assert times == sorted(times)
        assert len(set(times)) == 120
        assert times[-1] == pytest.approx(36 / 3, rel=0.2)
        assert times != [request.at for request in other]

    def test_loads_are_of_capacity(self, trace: Path) -> None:
        requests, shape = read_slice(trace, 0, 120), Shape()
        assert speed_of("5x", requests, shape) == 5.0
        half = speed_of("0.5", requests, shape)
        rate = 120 / requests[-1].at * half
        assert rate * ideal_seconds(requests, H200_8B) == pytest.approx(3.0)
        with pytest.raises(ConfigError, match=r"5x, or a share"):
            speed_of("much", requests, shape)

    def test_what_cannot_be_read_is_named(self, trace: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="fewer than 121"):
            read_slice(trace, 0, 121)
        with pytest.raises(ConfigError, match="--trace"):
            read_slice(tmp_path / "none", 0, 1)
        (tmp_path / "bad").write_text('{"timestamp": 0}\n')
        with pytest.raises(ConfigError, match="hash_ids"):
            read_slice(tmp_path / "bad", 0, 1)


def test_the_simulator_runs_the_same_grid(trace: Path) -> None:
    bench = PlacementBench(trace, requests=120, repeats=2, loads=("0.5", "1.0"))
    result = simulate(bench)
    assert len(result["rows"]) == 2 * 2 * len(ALGORITHMS)
    assert set(result["summary"]["0.5"]) == set(ALGORITHMS)
    assert all(row["failed"] == 0 < row["hit_tokens"] for row in result["rows"])


def test_several_gateways_say_how_far_they_agree(trace: Path) -> None:
    result = simulate(PlacementBench(trace, requests=120, repeats=1, loads=("0.5",), gateways=2))
    cost = result["summary"]["0.5"]["cost"]
    assert result["gateways"] == 2
    assert 0 < cost["same_share"] <= cost["within_bound_share"] <= 1
    assert all(row["agreement"]["asked"] == 240 for row in result["rows"])


def test_ours_is_compared_with_the_best_peer(trace: Path) -> None:
    def row(algorithm: str, mean: float, p90: float) -> Row:
        return Row("0.8", algorithm, 1, mean, p90, 10, 100, 1.0)

    bench = PlacementBench(trace, requests=120, loads=("0.8",))
    requests = read_slice(trace, 0, 120)
    slow, quick = PEER + "power_of_two", PEER + "cache_aware"
    rows = [row("cost", 0.8, 2.0), row(slow, 2.0, 1.9), row(quick, 1.0, 3.0)]
    compared = report(bench, rows, requests, "test")["summary"]["0.8"]["over_best_peer"]
    assert compared["peer"] == quick
    assert compared["ttft_mean"] == pytest.approx(0.8)
    assert compared["ttft_p90"] == pytest.approx(2.0 / 1.9)
    assert not compared["meets_target"]
    better = report(bench, [row("cost", 0.8, 1.9), *rows[1:]], requests, "test")
    assert better["meets_target"]


def test_a_missing_peer_is_said(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.bench.placement.PEER_PROGRAM", Path("/none"))
    with pytest.raises(NoPeerError, match="make peers"):
        run_placement_bench(PlacementBench(trace, requests=120))
    assert NoPeerError.exit_code == 3


@pytest.mark.heavy
@pytest.mark.xdist_group("processes")
@pytest.mark.timeout(300)
def test_a_short_run_on_processes(trace: Path) -> None:
    names = ("cost", "round_robin", *((PEER + "cache_aware",) if PEER_PROGRAM.exists() else ()))
    bench = PlacementBench(
        trace, requests=40, repeats=1, loads=("0.5",), algorithms=names,
        shape=Shape(prefill_workers=2, decode_workers=1, node_blocks=500),
    )  # fmt: skip
    result = run_placement_bench(replace(bench))
    assert [row["algorithm"] for row in result["rows"]] == list(names)
    for row in result["rows"]:
        assert row["failed"] == 0
        assert row["prompt_tokens"] > 0
        assert row["ttft_mean"] > 0.03
    assert result["emulated"]
