"""The eviction bench: known values on tiny traces, order of policies on a made one, the verb."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from workers.bench.commands import bench_evict
from workers.bench.evict import BENCH_POLICIES, run_evict_bench, table
from workers.bench.evict_traces import BLOCK_TOKENS, read_trace
from workers.core.errors import ConfigError
from workers.core.policies.registry import DEFAULT_POLICY, POLICIES

FULL = BLOCK_TOKENS


def write(path: Path, requests: Sequence[tuple[float, list[int], int, int]]) -> Path:
    """(seconds, hash_ids, input tokens, output tokens) each."""
    lines = [
        json.dumps(
            {
                "timestamp": int(now * 1000),
                "input_length": tokens,
                "output_length": output,
                "hash_ids": blocks,
            }
        )
        for now, blocks, tokens, output in requests
    ]
    text = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def tiny(path: Path, *chains: list[int]) -> Path:
    """Chains of full blocks, a second apart."""
    return write(path, [(i, chain, len(chain) * FULL, 1) for i, chain in enumerate(chains)])


def ratios(result: dict[str, Any]) -> dict[tuple[str, int], float]:
    return {(row["policy"], row["capacity_blocks"]): row["hit_ratio"] for row in result["rows"]}


def made_trace(path: Path, seed: int = 11, num_requests: int = 700) -> Path:
    """Sessions of several turns behind shared heads, and prompts that come once.

    Think times of minutes, a partly filled last block in each request, as chats have it.
    """
    draw = random.Random(seed)
    fresh = iter(range(1, 10**9))
    heads = [[next(fresh) for _ in range(4)] for _ in range(3)]
    due: list[tuple[float, list[int], int]] = []  # when a session goes on, its blocks, turns left
    requests: list[tuple[float, list[int], int, int]] = []
    now = 0.0
    while len(requests) < num_requests:
        now += draw.expovariate(2.0)
        if due and due[0][0] <= now:
            _, chain, turns = due.pop(0)
        else:
            chain = [*draw.choice(heads), *(next(fresh) for _ in range(draw.randrange(3, 25)))]
            turns = draw.choice([0, 0, 1, 4, 8])
        chain = [*chain, *(next(fresh) for _ in range(draw.randrange(1, 5)))]
        requests.append((now, [*chain, next(fresh)], len(chain) * FULL + 100, draw.randrange(500)))
        if turns:
            due.append((now + draw.lognormvariate(4.6, 0.7), chain, turns - 1))
            due.sort(key=lambda session: session[0])
    return write(path, requests)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = made_trace(tmp_path_factory.mktemp("traces") / "made.jsonl.gz")
    return run_evict_bench(path, (), (300, 1500), with_whatif=True)


class TestKnownValues:
    def test_blocks_used_in_turns(self, tmp_path: Path) -> None:
        """Two of three fit: LRU always holds the wrong two, the optimum leaves one out."""
        path = tiny(tmp_path / "t.jsonl", [0], [1], [2], [0], [1])
        found = ratios(run_evict_bench(path, ("lru", "min"), (2, 3)))
        assert found == {("lru", 2): 0, ("min", 2): 0.4, ("lru", 3): 0.4, ("min", 3): 0.4}

    def test_a_hit_is_a_held_prefix(self, tmp_path: Path) -> None:
        path = tiny(tmp_path / "t.jsonl", [0, 1], [0, 2], [0, 1])
        found = ratios(run_evict_bench(path, ("lru", "min"), (2,)))
        assert found["lru", 2] == pytest.approx(2 / 6, abs=1e-6)
        assert found["min", 2] == pytest.approx(3 / 6, abs=1e-6)

    def test_only_the_baseline_keeps_partly_filled_blocks(self, tmp_path: Path) -> None:
        requests = [(float(now), [0, 1], FULL + 88, 1) for now in range(2)]
        path = write(tmp_path / "t.jsonl", requests)
        found = ratios(run_evict_bench(path, (), (10,)))
        assert found.pop(("lru", 10)) == 0.5
        assert found.pop(("min", 10)) == 0.5
        assert set(found.values()) == {0.25}

    def test_a_request_larger_than_the_pool(self, tmp_path: Path) -> None:
        path = tiny(tmp_path / "t.jsonl", [0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7])
        for policy, ratio in ratios(run_evict_bench(path, (), (2,))).items():
            assert ratio == pytest.approx(2 / 12, abs=1e-6), policy


class TestMadeTrace:
    def test_has_every_policy_at_every_capacity(self, made: dict[str, Any]) -> None:
        cells = [(row["policy"], row["capacity_blocks"]) for row in made["rows"]]
        assert sorted(cells) == sorted((p, c) for p in BENCH_POLICIES for c in (300, 1500))
        assert all(row["ns_per_block"] > 0 for row in made["rows"])
        assert {row["ns_over_lru"] for row in made["rows"] if row["policy"] == "lru"} == {1.0}

    def test_nothing_beats_the_optimum(self, made: dict[str, Any]) -> None:
        found = ratios(made)
        for (policy, capacity), ratio in found.items():
            assert 0 <= ratio <= found["min", capacity], policy

    def test_the_default_is_better_than_lru(self, made: dict[str, Any]) -> None:
        found = ratios(made)
        for capacity in (300, 1500):
            assert found[DEFAULT_POLICY, capacity] >= found["lru", capacity]
        assert found[DEFAULT_POLICY, 1500] > 1.1 * found["lru", 1500]

    def test_more_room_is_better(self, made: dict[str, Any]) -> None:
        found = ratios(made)
        for policy in POLICIES:
            assert found[policy, 300] < found[policy, 1500]

    def test_what_if_is_near_what_is(self, made: dict[str, Any]) -> None:
        assert len(made["whatif"]) == 10
        for row in made["whatif"]:
            assert abs(row["error"]) < 0.03, row

    def test_the_same_again_is_the_same(self, made: dict[str, Any], tmp_path: Path) -> None:
        again = run_evict_bench(made_trace(tmp_path / "made.jsonl"), ("decay", "class"), (1500,))
        found = ratios(made)
        assert ratios(again) == {key: found[key] for key in (("decay", 1500), ("class", 1500))}


class TestReading:
    def test_a_line_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        path = tiny(tmp_path / "t.jsonl", [0], [1])
        path.write_text(path.read_text() + '\n{"timestamp": 1}\n')
        with pytest.raises(ConfigError, match=r"t.jsonl:3.*input_length"):
            read_trace(path)

    def test_nothing_to_read(self, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").write_text("\n")
        with pytest.raises(ConfigError, match="holds no request"):
            read_trace(tmp_path / "empty.jsonl")
        (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
        with pytest.raises(ConfigError, match=r"--trace = .*cut\.gz"):
            read_trace(tmp_path / "cut.gz")


class TestVerb:
    def run(self, *arguments: str) -> Any:
        app = typer.Typer()
        app.command()(bench_evict)
        return CliRunner().invoke(app, list(arguments))

    def test_json(self, tmp_path: Path) -> None:
        path = tiny(tmp_path / "t.jsonl", [0], [1], [0])
        reply = self.run("--trace", str(path), "--policy", "lru", "--capacity", "9", "--json")
        assert reply.exit_code == 0, reply.output
        (row,) = json.loads(reply.output)["rows"]
        assert (row["policy"], row["capacity_blocks"]) == ("lru", 9)
        assert row["hit_ratio"] == pytest.approx(1 / 3, abs=1e-6)

    def test_for_eyes(self, tmp_path: Path) -> None:
        path = tiny(tmp_path / "t.jsonl", [0], [1], [0])
        reply = self.run("--trace", str(path), "--capacity", "9", "--whatif")
        assert reply.exit_code == 0, reply.output
        assert "too few requests to say" in reply.output
        for policy in BENCH_POLICIES:
            assert f"\n{policy} " in reply.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--policy", "mru"], "--policy = 'mru': no such policy. Take one of: min, lru"),
            (["--capacity", "0"], "--capacity = 0: is no number of blocks"),
        ],
    )
    def test_what_cannot_work_is_named(
        self, tmp_path: Path, arguments: list[str], message: str
    ) -> None:
        path = tiny(tmp_path / "t.jsonl", [0])
        reply = self.run("--trace", str(path), *arguments)
        assert reply.exit_code == 2
        assert message in reply.output

    def test_table_without_lru_has_no_ratio(self, tmp_path: Path) -> None:
        path = tiny(tmp_path / "t.jsonl", [0], [0])
        assert "0.5000" in table(run_evict_bench(path, ("decay",), (4,)))
