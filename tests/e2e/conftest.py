"""The model, and the plain engine that answers of clusters are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
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
def plain_beginning(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path
) -> Iterator[Future[PlainEngine]]:
    """It starts beside a cluster: an engine starts on one core. On this host, outside networks."""
    log_file = tmp_path_factory.mktemp("plain") / "plain.log"
    # The engine ends with the thread that started it, which therefore stays.
    with ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        engine = plain_engine(model_folder, MODEL, DTYPE, log_file, ready_seconds=READY_SECONDS)
        beginning = thread.submit(stack.enter_context, engine)
        yield beginning
        beginning.exception(2 * READY_SECONDS)


@pytest.fixture(scope="session")
def plain(plain_beginning: Future[PlainEngine]) -> PlainEngine:
    return plain_beginning.result(2 * READY_SECONDS)
