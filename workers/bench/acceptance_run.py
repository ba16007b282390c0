"""The acceptance run from nothing: its own cluster, then its own plain engine, then the figures."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import httpx2

from workers.bench.acceptance import (
    PlainAnswers,
    PoolAnswer,
    Target,
    find_target,
    leaked_pins,
    report,
    run_plain,
    run_twice,
)
from workers.bench.cluster import own_cluster, plain_engine
from workers.bench.prompts import Prompt, make_prompts
from workers.bench.rss import PeakRss
from workers.data_dir import default_data_dir
from workers.models.resolve import resolve_model

_REQUEST_SECONDS = 180.0


def run_acceptance(
    folder: Path, *, model: str, num_prompts: int, max_tokens: int, dtype: str,
    block_tokens: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Everything, in `folder`. Raises BenchClusterError or EngineAnswerError where it cannot go on."""
    started = time.monotonic()
    resolved = resolve_model(model, default_data_dir(), progress=_say)
    prompts = make_prompts(num_prompts, seed=seed)
    model_folder = Path(resolved.source)
    with httpx2.Client(timeout=_REQUEST_SECONDS) as client:
        _say("starting a cluster")
        with own_cluster(folder, model_folder, dtype, block_tokens) as state:
            target = find_target(client, state.gateway_url, state.control_plane_url)
            pool = _measure_pool(client, target, prompts, max_tokens)
        _say("starting a plain engine")
        with plain_engine(model_folder, target.model, dtype, folder / "plain.log") as engine:
            served = _served(pool[0], pool[1])
            plain: PlainAnswers = run_plain(
                client, engine.url, engine.pid, target.model, prompts, served, max_tokens
            )
    first, second, external, pins, peak = pool
    figures = report(first, second, plain, external, pins, peak)
    return {**figures, "dtype": dtype, "took_seconds": round(time.monotonic() - started, 1)}


def _measure_pool(
    client: httpx2.Client, target: Target, prompts: list[Prompt], max_tokens: int
) -> tuple[list[PoolAnswer], list[PoolAnswer], dict[str, float], int, int]:
    _say(f"two runs of {len(prompts)} prompts through the pool")
    with PeakRss(target.pids) as rss:
        first, second, external = run_twice(client, target, prompts, max_tokens)
    pins = leaked_pins(client, target.control_plane_url)
    return first, second, external, pins, rss.peak_bytes


def _served(first: list[PoolAnswer], second: list[PoolAnswer]) -> list[set[int]]:
    return [{a.served_tokens, b.served_tokens} for a, b in zip(first, second, strict=True)]


def _say(text: str) -> None:
    sys.stderr.write(f"acceptance: {text}\n")
    sys.stderr.flush()
