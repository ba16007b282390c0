"""The gateway's memory over a hundred thousand requests (A39, A40): `make soak` at full size.

Everything is on: a tokenizer, keys of 200 tenants, an agent whose blocks come and go, leg reports,
records with their prompts' tokens. No two prompts are alike, one in seven has 8,000 tokens; three in
ten clients leave at some point, some requests meet workers that fail.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import uvloop
from agent_process import AgentProcess
from gateway_crowd import Crowd, client, client_keys
from gateway_load import LoadedGateway, loaded_gateway, policy
from paced_engine import Plan
from pool_churn import BLOCK_TOKENS, Churner

from workers.core.errors import AgentUnavailableError, RefusedError

CLIENTS = 48
SLAB_BYTES = 64 << 20
MOST_CACHED_MIB = 40  # the bounds of both caches


@dataclass(frozen=True)
class Size:
    """RSS is looked at after each `step` requests. From `warm_up` on it may grow by `growth`, and by
    what bounded caches of prompts have come to hold, which here are all different."""

    requests: int
    step: int
    warm_up: int
    growth: int
    most: int


FULL = Size(100_000, 10_000, 20_000, 12 << 20, 512 << 20)
SHORT = Size(2_000, 500, 1_000, 90 << 20, 300 << 20)


def _more(agent: AgentProcess) -> dict[str, Any]:
    """Of the view."""
    node = {
        "id": "n1",
        "state": "ready",
        "events_endpoint": agent.address,
        "block_tokens": BLOCK_TOKENS,
    }
    slo = policy("slo", mode="observe", max_ttft_ms=2000, max_tbt_ms=200, percentile=0.95)
    scheduling = policy("scheduling", max_concurrent_per_decode=4096, observe="mooncake",
                        normalisation=["line_ends", "spaces"])  # fmt: skip
    return {
        "nodes": [node], "client_keys": client_keys(),
        "policies": [slo, scheduling, policy("records", prompts="tokens")],
    }  # fmt: skip


@contextmanager
def _blocks_come_and_go(agent: AgentProcess, folder: Path) -> Iterator[None]:
    """A worker that stores chains of blocks: far more than the slab holds."""
    churner = Churner("writer", str(agent.socket), folder / "counts.json", 1)
    stop, numbers = threading.Event(), count()

    def run() -> None:
        while not stop.wait(0.05):
            number = next(numbers)
            with suppress(AgentUnavailableError, RefusedError):  # a busy machine
                churner.attach()
                churner.store(churner.chains[number % len(churner.chains)], str(number))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        churner.client.close()


async def _cached(gateway: LoadedGateway) -> int:
    return int(sum((await gateway.gauges("cache_bytes")).values()))


async def _crowd(
    gateway: LoadedGateway, size: Size, samples: list[int], cached: list[int]
) -> Crowd:
    crowd, numbers = Crowd(), iter(range(size.requests))
    looks: list[asyncio.Task[None]] = []

    async def look() -> None:
        samples.append(gateway.rss())
        cached.append(await _cached(gateway))
        print(f"{samples[-1] >> 20} MiB, {cached[-1] >> 20} of them cached", flush=True)

    def next_number() -> int | None:
        number = next(numbers, None)
        if number is not None and number and number % size.step == 0:
            looks.append(asyncio.get_running_loop().create_task(look()))
        return number

    await asyncio.gather(*(
        client(gateway.port, crowd, next_number, random.Random(seed)) for seed in range(CLIENTS)
    ))  # fmt: skip
    await asyncio.gather(*looks)
    await gateway.nothing_held()
    await look()
    return crowd


async def _measure(folder: Path, model: Path, size: Size, agent: AgentProcess) -> dict[str, Any]:
    plan = Plan(workers=6, chunks=4, every=0.004, agent=str(agent.socket))
    log, samples, cached = folder / "gateway.log", [0], [0]
    async with loaded_gateway(folder, plan, model, log, **_more(agent)) as gateway:
        samples[0], began = gateway.rss(), time.monotonic()
        crowd = await _crowd(gateway, size, samples, cached)
        seconds = time.monotonic() - began
        deadline = time.monotonic() + 60
        while await gateway.gauges("decisions_buffered"):
            assert time.monotonic() < deadline, "records are left that were not sent"
            await asyncio.sleep(0.2)
        return {
            "requests": crowd.done, "seconds": seconds, "outcomes": crowd.outcomes,
            "wrong": crowd.wrong, "rss_mib": [round(rss / (1 << 20), 1) for rss in samples],
            "cached_mib": [round(size / (1 << 20), 1) for size in cached],
            "cpu_ms_per_request": gateway.cpu_seconds() / crowd.done * 1000,
            "records": gateway.sink.statuses,
            "series": await gateway.gauges("requests", "cancelled", "decisions_dropped", "index_blocks",
                                           "leg_retries", "failed", "prompts_left_out"),
            "log": log.read_text()[-2000:],
        }  # fmt: skip


def _run(folder: Path, model: Path, size: Size) -> None:
    agent = AgentProcess(folder, slab_bytes=SLAB_BYTES)
    try:
        agent.start()
        with _blocks_come_and_go(agent, folder):
            figures = uvloop.run(_measure(folder, model, size, agent))
    finally:
        agent.close()
    print(json.dumps(figures, indent=1))
    assert not figures["wrong"], figures
    assert "Traceback" not in figures["log"], figures
    rss, cached = figures["rss_mib"], figures["cached_mib"]
    warm = [a - b for a, b in zip(rss, cached, strict=True)][size.warm_up // size.step :]
    assert max(warm) - warm[0] < size.growth >> 20, (rss, cached)
    assert max(rss) < size.most >> 20, rss
    assert 0 < max(cached) <= MOST_CACHED_MIB, cached
    outcomes = figures["outcomes"]
    assert min(outcomes["200"], outcomes["left"], outcomes["502"], outcomes["400"]) > 0, outcomes
    assert figures["series"]["perilune_gateway_index_blocks"] > 100, figures["series"]


@pytest.mark.heavy
@pytest.mark.xdist_group("soaks")
@pytest.mark.timeout(300)
def test_a39_memory_over_some_thousand_requests(tmp_path: Path, model_folder: Path) -> None:
    _run(tmp_path, model_folder, SHORT)


@pytest.mark.soak
def test_a40_memory_is_flat_over_a_hundred_thousand_requests(
    tmp_path: Path, model_folder: Path
) -> None:
    _run(tmp_path, model_folder, FULL)
