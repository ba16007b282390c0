"""One real cluster for all tests here: two vLLM workers on CPU, the pool, gateway, control plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from live_cluster import BLOCK_TOKENS, DTYPE, LiveCluster

from workers.bench.acceptance import find_target
from workers.bench.cluster import PlainEngine, own_cluster, plain_engine
from workers.data_dir import default_data_dir
from workers.models.resolve import resolve_model
from workers.supervisor.home import Home


@pytest.fixture(scope="package")
def model_folder() -> Path:
    return Path(resolve_model("smollm2", default_data_dir()).source)


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[LiveCluster]:
    data = tmp_path_factory.mktemp("cluster")
    with (
        httpx2.Client(timeout=120) as client,
        own_cluster(data, model_folder, DTYPE, BLOCK_TOKENS) as state,
    ):
        target = find_target(client, state.gateway_url, state.control_plane_url)
        yield LiveCluster(Home(data), model_folder, client, target)


@pytest.fixture(scope="package")
def plain(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, live: LiveCluster
) -> Iterator[PlainEngine]:
    log_file = tmp_path_factory.mktemp("plain") / "plain.log"
    with plain_engine(model_folder, live.model, DTYPE, log_file) as engine:
        yield engine


@pytest.fixture(scope="package")
def vllm_prefill_url(live: LiveCluster) -> str:
    return live.target.worker_urls[live.target.prefill_workers[0]]
