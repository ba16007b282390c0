"""Many slow streams at once through one gateway process: `make soak` at full size.

What the gateway adds to a piece is what it takes through the gateway less what it takes straight
from the engines, by the same clients at the same rate.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop
from gateway_load import LoadedGateway, StreamClient, Streams, loaded_gateway, request_bytes
from paced_engine import Plan

EVERY_SECONDS = 0.5
CONNECT_SECONDS = 60.0
STARVED_SHARE = 0.15
"""A gateway that waits for a core for longer than this share of the time says nothing about delays."""


@dataclass(frozen=True)
class Size:
    """How much; bounds in seconds and bytes."""

    streams: int
    chunks: int
    ramp_seconds: float
    max_p99_added: float
    max_rss: int


FULL = Size(2000, 120, 10.0, 0.25, 400 << 20)
SHORT = Size(250, 10, 2.0, 0.5, 250 << 20)


async def _stream_all(port: int, size: Size, leg: dict[str, Any]) -> Streams:
    """Opens the streams evenly over the ramp and waits for the last one's end."""
    loop, streams, clients = asyncio.get_running_loop(), Streams(), []
    for number in range(size.streams):
        prompt = f"Stream {number}: " + "tell me a long story, slowly. " * 20
        body = {"model": "m", "prompt": prompt, "max_tokens": size.chunks, "stream": True, **leg}
        payload = json.dumps(body, separators=(",", ":")).encode()
        client = StreamClient(streams, request_bytes("/v1/completions", payload), size.chunks)
        await loop.create_connection(lambda c=client: c, "127.0.0.1", port)  # type: ignore[misc]
        clients.append(client.ended)
        await asyncio.sleep(size.ramp_seconds / size.streams)
    bound = size.chunks * EVERY_SECONDS + CONNECT_SECONDS
    async with asyncio.timeout(bound):
        await asyncio.gather(*clients)
    return streams


def _percentiles(streams: Streams) -> dict[str, float]:
    delays = sorted(streams.delays)
    at = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "worst": 1.0}
    return {name: delays[min(len(delays) - 1, int(len(delays) * q))] for name, q in at.items()}


async def _watch(gateway: LoadedGateway, most: list[int]) -> None:
    while True:
        most.append(int(sum((await gateway.gauges("in_flight")).values())))
        await asyncio.sleep(0.5)


async def _measure(folder: Path, model: Path, size: Size) -> dict[str, Any]:
    plan = Plan(workers=4, chunks=size.chunks, every=EVERY_SECONDS)
    log = folder / "gateway.log"
    async with loaded_gateway(folder, plan, model, log) as gateway:
        direct = await _stream_all(gateway.engine_ports[-1], size, {})
        rss, cpu, began, most = gateway.rss(), gateway.cpu_seconds(), time.monotonic(), [0]
        waited = gateway.waited_seconds()
        watcher = asyncio.create_task(_watch(gateway, most))
        through = await _stream_all(gateway.port, size, {})
        watcher.cancel()
        seconds = time.monotonic() - began
        straight, ours = _percentiles(direct), _percentiles(through)
        figures: dict[str, Any] = {
            "streams": size.streams, "pieces": len(through.delays), "most_at_once": max(most),
            "cpu_share": (gateway.cpu_seconds() - cpu) / seconds,
            "cpu_us_per_piece": (gateway.cpu_seconds() - cpu) / len(through.delays) * 1e6,
            "waited_for_a_core": (gateway.waited_seconds() - waited) / seconds,
            "rss_before": rss, "rss_with_streams": gateway.rss(),
            "added_ms": {name: (ours[name] - straight[name]) * 1000 for name in ours},
            "direct_ms": {name: value * 1000 for name, value in straight.items()},
            "through_ms": {name: value * 1000 for name, value in ours.items()},
            "broken": (direct.broken + through.broken)[:3], "log": log.read_text()[-1000:],
        }  # fmt: skip
        await gateway.nothing_held()
        return figures


def _run(folder: Path, model: Path, size: Size) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    figures = uvloop.run(_measure(folder, model, size))
    print(json.dumps(figures, indent=1))
    assert not figures["broken"], figures
    assert figures["pieces"] == size.streams * size.chunks, figures
    assert figures["most_at_once"] > 0.8 * size.streams, figures
    if figures["waited_for_a_core"] < STARVED_SHARE:
        assert figures["added_ms"]["p99"] < size.max_p99_added * 1000, figures
    assert figures["rss_with_streams"] < size.max_rss, figures
    assert not figures["log"], figures


@pytest.mark.heavy
@pytest.mark.xdist_group("soaks")
def test_hundreds_of_slow_streams_at_once(tmp_path: Path, model_folder: Path) -> None:
    _run(tmp_path, model_folder, SHORT)


@pytest.mark.soak
def test_two_thousand_slow_streams_at_once(tmp_path: Path, model_folder: Path) -> None:
    _run(tmp_path, model_folder, FULL)
