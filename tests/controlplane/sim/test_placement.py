"""The simulator on a small made-up trace: it keeps its books, and order of merit is as expected."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from controlplane.core.placement import ALGORITHMS, Rules
from controlplane.sim.placement import PlacementSim, SimCluster, SimRequest, SimResult
from workers.core.cost_model import H200_8B, curve_at

CLUSTER = SimCluster(num_workers=4, node_blocks=2000, block_tokens=512, costs=H200_8B)


def sessions(rate: float, seed: int, num_sessions: int = 60, turns: int = 6) -> list[SimRequest]:
    """Chats whose turns build on one another, all behind one system prompt of two blocks."""
    rng = random.Random(seed)
    requests = []
    for session in range(num_sessions):
        at = rng.random() * num_sessions * turns / rate
        blocks: list[int] = [1, 2]
        for _ in range(turns):
            blocks += [1000 * (session + 1) + len(blocks) + i for i in range(rng.randrange(4, 20))]
            requests.append(
                SimRequest(at, len(blocks) * 512 + 100, (*blocks, 10**9 + len(requests)))
            )
            at += rng.expovariate(0.2)
    return sorted(requests, key=lambda request: request.at)


def run(algorithm: str, rate: float, cluster: SimCluster = CLUSTER) -> SimResult:
    rules = Rules(algorithm=algorithm)  # type: ignore[arg-type]
    return PlacementSim(cluster, rules, random.Random(1)).run(sessions(rate, seed=1))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_request_is_served_once(algorithm: str) -> None:
    result = run(algorithm, rate=6)
    assert len(result.ttft_seconds) == 360
    assert min(result.ttft_seconds) > 0
    assert 0 < result.hit_tokens < result.prompt_tokens
    least = sum(H200_8B.prefill(request.prompt_tokens, request.prompt_tokens - 1)
                for request in sessions(6, seed=1))  # fmt: skip
    assert sum(result.busy_seconds) >= least


@pytest.mark.parametrize("rate", [4, 8, 12])
def test_ours_is_the_quickest(rate: float) -> None:
    mean = {name: sum(run(name, rate).ttft_seconds) for name in ALGORITHMS}
    for baseline in ("cache_aware", "least_loaded", "round_robin"):
        assert mean["cost"] < 0.95 * mean[baseline], mean
    assert mean["cost"] < 1.05 * mean["mooncake"]


def test_a_cluster_without_links_moves_nothing() -> None:
    alone = run("cost", 8, replace(CLUSTER, knows_links=False))
    assert alone.hit_tokens < run("cost", 8).hit_tokens


def test_costs_are_those_that_were_measured() -> None:
    for tokens, cold, hit in ((4096, 0.104, 0.030), (16_384, 0.51, 0.102), (65_536, 3.40, 0.300)):
        assert H200_8B.prefill(tokens, 0) == pytest.approx(cold, rel=0.03)
        assert H200_8B.prefill(tokens, tokens) == pytest.approx(hit, rel=1e-6)
    assert H200_8B.step(1, 0) == 0.0052
    scaled = replace(H200_8B, scale=16, time_factor=0.5)
    assert scaled.prefill(1024, 0) == pytest.approx(H200_8B.prefill(16_384, 0) / 2)
    assert scaled.step(1, 0) == pytest.approx(0.0052 * 16 / 2)
    assert curve_at((), 5) == curve_at(((10, 1.0),), 0) == 0.0
