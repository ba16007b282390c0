"""One real cluster for all tests here: two vLLM workers on CPU, the pool, gateway, control plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from live_cluster import BLOCK_TOKENS, DTYPE, LiveCluster

from workers.bench.acceptance import find_target
from workers.bench.cluster import own_cluster
from workers.supervisor.home import Home


@pytest.fixture(scope="package")
def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_folder: Path
) -> Iterator[LiveCluster]:
    if any("plain" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("plain_beginning")
    data = tmp_path_factory.mktemp("cluster")
    with (
        httpx2.Client(timeout=120) as client,
        own_cluster(data, model_folder, DTYPE, BLOCK_TOKENS) as state,
    ):
        target = find_target(client, state.gateway_url, state.control_plane_url)
        yield LiveCluster(Home(data), model_folder, client, target)


@pytest.fixture(scope="package")
def vllm_prefill_url(live: LiveCluster) -> str:
    return live.target.worker_urls[live.target.prefill_workers[0]]
