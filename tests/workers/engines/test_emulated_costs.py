"""Emulated workers take the cost model's times, and answer the legs of foreign connectors."""

from __future__ import annotations

import time
from dataclasses import replace

import httpx2
import pytest

from workers.core.cost_model import H200_8B
from workers.engines.emulated.fleet import Fleet
from workers.engines.emulated.worker import EngineConfig, WorkerSpec

SPECS = [WorkerSpec("p1", "prefill", 0), WorkerSpec("d1", "decode", 0)]
PROMPT = list(range(512))  # stands for 8192 tokens of the model
COSTS = replace(H200_8B, scale=16)


async def _complete(fleet: Fleet, worker: str, **fields: object) -> tuple[dict, float]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 1, "ignore_eos": True} | fields
    async with httpx2.AsyncClient(timeout=30, verify=False) as client:
        began = time.monotonic()
        reply = await client.post(f"{fleet.urls[worker]}/v1/completions", json=body)
        seconds = time.monotonic() - began
    assert reply.status_code == 200, reply.text
    return reply.json(), seconds


@pytest.fixture
async def fleet():
    made = Fleet(SPECS, EngineConfig("m", costs=COSTS, prompt_tokens_details=True))
    await made.start()
    yield made
    await made.stop()


async def test_prefill_takes_what_was_measured(fleet: Fleet) -> None:
    cold = COSTS.prefill(512, 0)
    assert cold == pytest.approx(0.228, rel=0.02)
    _, seconds = await _complete(fleet, "p1")
    assert cold + COSTS.decode_seconds <= seconds < cold + 1.0
    reply, again = await _complete(fleet, "p1")  # the device has it now
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 511
    assert again >= COSTS.prefill(512, 511)
    assert fleet.apis["p1"].worker.counters.prefill_seconds == pytest.approx(
        cold + COSTS.prefill(512, 511), rel=1e-6
    )


async def test_a_routers_legs_are_answered_as_its_connector_expects(fleet: Fleet) -> None:
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    reply, _ = await _complete(fleet, "p1", kv_transfer_params=wanted)
    params = reply["kv_transfer_params"]
    assert params["do_remote_prefill"]
    assert not params["do_remote_decode"]
    assert params["remote_engine_id"] == "p1"
    reply, _ = await _complete(fleet, "d1", kv_transfer_params=params, max_tokens=3)
    assert reply["usage"]["completion_tokens"] == 3
    spent = fleet.apis["d1"].worker.counters.prefill_seconds
    assert spent < 0.1 * COSTS.prefill(512, 0)  # its KV came from the prefill worker


async def test_a_device_without_blocks_keeps_nothing() -> None:
    fleet = Fleet(SPECS[:1], EngineConfig("m", device_blocks=0, prompt_tokens_details=True))
    await fleet.start()
    try:
        for _ in range(2):
            reply, _ = await _complete(fleet, "p1")
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    finally:
        await fleet.stop()
