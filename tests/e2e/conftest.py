"""The model, and the plain engine that answers of clusters on this host are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_cluster import DTYPE

from workers.bench.cluster import PlainEngine, plain_engine
from workers.data_dir import default_data_dir
from workers.models.resolve import resolve_model

MODEL = "smollm2"
READY_SECONDS = 600.0
"""Others may start beside it."""


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return Path(resolve_model(MODEL, default_data_dir()).source)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[PlainEngine]:
    log_file = tmp_path_factory.mktemp("plain") / "plain.log"
    with plain_engine(model_folder, MODEL, DTYPE, log_file, ready_seconds=READY_SECONDS) as engine:
        yield engine
