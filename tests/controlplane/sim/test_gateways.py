"""Several gateways on the simulator: how far they agree, and what their number costs."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from controlplane.core.placement import Rules
from controlplane.sim.placement import PlacementSim, SimCluster, SimRequest, SimResult
from workers.core.cost_model import H200_8B

CLUSTER = SimCluster(num_workers=4, node_blocks=2000, block_tokens=512, costs=H200_8B)
AGREED = 0.9
"""Of what is asked, the share that the stated bound holds for."""


def sessions(
    rate: float, seed: int = 1, num_sessions: int = 80, turns: int = 6
) -> list[SimRequest]:
    """Chats whose turns build on one another, all behind one system prompt of two blocks."""
    rng, requests = random.Random(seed), []
    for session in range(num_sessions):
        at = rng.random() * num_sessions * turns / rate
        blocks: list[int] = [1, 2]
        for _ in range(turns):
            blocks += [1000 * (session + 1) + len(blocks) + i for i in range(rng.randrange(4, 20))]
            last = 10**9 + len(requests)
            requests.append(SimRequest(at, len(blocks) * 512 + 100, (*blocks, last)))
            at += rng.expovariate(0.2)
    return sorted(requests, key=lambda request: request.at)


def run(cluster: SimCluster, rate: float, seed: int = 1) -> SimResult:
    return PlacementSim(cluster, Rules(), random.Random(seed)).run(sessions(rate))


@pytest.mark.parametrize("rate", [6, 10])
@pytest.mark.parametrize("gateways", [2, 3])
def test_gateways_agree_within_the_stated_bound(gateways: int, rate: float) -> None:
    several = run(replace(CLUSTER, gateways=gateways), rate)
    alone = run(CLUSTER, rate)
    assert several.agreement.asked == 480 * gateways * (gateways - 1)
    assert several.agreement.summary()["within_bound_share"] >= AGREED
    assert fmean(several.ttft_seconds) < 1.25 * fmean(alone.ttft_seconds)


def test_without_the_nodes_streams_they_would_not() -> None:
    """What the bound is worth: gateways that tell each other nothing."""
    silent = run(replace(CLUSTER, gateways=2, tells=frozenset()), 10)
    telling = run(replace(CLUSTER, gateways=2), 10)
    assert silent.agreement.summary()["within_bound_share"] < 0.75
    assert fmean(telling.ttft_seconds) < 0.95 * fmean(silent.ttft_seconds)


@pytest.mark.parametrize("gateways", [2, 3])
def test_late_news_are_no_worse_than_none(gateways: int) -> None:
    late = run(replace(CLUSTER, gateways=gateways, tell_seconds=0.3), 6)
    silent = run(replace(CLUSTER, gateways=gateways, tells=frozenset()), 6)
    assert fmean(late.ttft_seconds) < 1.1 * fmean(silent.ttft_seconds)
