"""A worker that is added while requests run: it is tried soon, and not by all of them at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from controlplane.core.placement import Rules
from controlplane.sim.placement import PlacementSim, SimCluster, SimRequest
from workers.core.cost_model import H200_8B

CLUSTER = SimCluster(num_workers=4, node_blocks=2000, block_tokens=512, costs=H200_8B)
BEFORE = 200
FIRST_WITHIN = 40
"""Requests after it has come; docs/architecture.md says so."""
NEXT = 40


def prompts(rate: float) -> list[SimRequest]:
    """Half of them continue an earlier one, which lies on another worker."""
    rng, requests, at = random.Random(7), [], 0.0
    chats: list[list[int]] = []
    for number in range(400):
        at += rng.expovariate(rate)
        if chats and rng.random() < 0.5:
            blocks = rng.choice(chats[-40:])
        else:
            blocks = [1, 2]
            chats.append(blocks)
        blocks += [1000 * (number + 1) + i for i in range(rng.randrange(4, 16))]
        requests.append(SimRequest(at, len(blocks) * 512 + 100, (*blocks, 10**9 + number)))
    return requests


@pytest.mark.parametrize("rate", [3, 8, 14])
@pytest.mark.parametrize("gateways", [1, 2])
def test_a_new_worker_is_tried_soon_and_no_herd_goes_there(gateways: int, rate: float) -> None:
    requests = prompts(rate)
    joins_at = requests[BEFORE].at
    cluster = replace(CLUSTER, gateways=gateways, joins_at=joins_at)
    result = PlacementSim(cluster, Rules(), random.Random(1)).run(requests)
    new = [name == "p03" for name in result.chosen]
    assert not any(new[:BEFORE])
    first = new.index(True) - BEFORE
    assert first < FIRST_WITHIN
    after = new[BEFORE + first :][:NEXT]
    assert 0.05 * NEXT <= sum(after) <= 0.5 * NEXT
    longest = max(map(len, "".join("x" if one else " " for one in after).split()))
    assert longest <= 6
