"""Workers that fail: retried before the first byte, told after it, never silent, never doubled."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from workers.engines.emulated.faults import Faults

FAULTS = [
    pytest.param(Faults(status=500), id="status"),
    pytest.param(Faults(reset=True), id="reset"),
    pytest.param(Faults(status=503, retry_after=1), id="busy"),
]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failing_prefill_worker_is_replaced(rig: Any, fault: Faults) -> None:
    await rig.start()
    rig.api("p1").faults.set(fault)
    for _ in range(4):
        assert (await rig.complete(prompt="hello there", max_tokens=3)).status_code == 200
    assert rig.gateway.stats.retries_prefill >= 1
    assert rig.gateway.stats.failed == 0
    rows = [d for d in rig.control_plane.decisions().values() if d.retries]
    if not rows:
        await rig.gateway._reporter.flush()
        rows = [d for d in rig.control_plane.decisions().values() if d.retries]
    assert rows[0].failed_leg == "prefill"
    assert "p1" in rows[0].error


@pytest.mark.parametrize("fault", FAULTS)
async def test_without_prefill_workers_decode_computes_the_prompt(rig: Any, fault: Faults) -> None:
    await rig.start()
    for name in ("p1", "p2"):
        rig.api(name).faults.set(fault)
    response = await rig.complete(prompt="hello there", max_tokens=3)
    assert response.status_code == 200
    assert rig.gateway.stats.decode_side_prefills == 1
    record = await rig.control_plane.ended()
    assert (record.failed_leg, record.retries, record.status) == ("prefill", 2, "finished_length")
    again = await rig.complete(prompt="hello there", max_tokens=3)
    assert again.json()["choices"] == response.json()["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [*FAULTS, pytest.param(
    Faults(end_after_chunks=0), id="empty"), pytest.param(Faults(reset_after_chunks=0), id="cut")])  # fmt: skip
async def test_a_decode_leg_that_fails_before_its_first_byte_moves(
    rig: Any, fault: Faults, stream: bool
) -> None:
    await rig.start()
    for name in ("d1", "d2"):
        fault_once = replace_times(fault)
        rig.api(name).faults.set(fault_once)
    # Each worker fails once: some request meets both and is told so, the others are served.
    for _ in range(3):
        if stream:
            response = await rig.client.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": "hello", "max_tokens": 4, "stream": True},
            )
            text = response.text
            assert response.status_code in (200, 502, 503)
            if response.status_code == 200:
                assert text.count("[DONE]") == 1
                assert text.count('"text":') == 4  # nothing twice
        else:
            response = await rig.complete(prompt="hello", max_tokens=4)
            assert response.status_code in (200, 502, 503)
    assert response.status_code == 200 or rig.gateway.cluster.health.paused(time.monotonic())


def replace_times(fault: Faults) -> Faults:
    values = {name: getattr(fault, name) for name in fault.__struct_fields__}
    return Faults(**{**values, "times": 1})


async def test_when_every_decode_worker_fails_the_client_reads_leg_and_worker(rig: Any) -> None:
    await rig.start()
    for name in ("d1", "d2"):
        rig.api(name).faults.set(Faults(status=500))
    response = await rig.complete(prompt="hello")
    assert response.status_code == 502
    error = response.json()["error"]
    assert error["code"] == "decode_leg_failed"
    record = await rig.control_plane.ended("failed")
    assert record.request_id in error["message"]
    assert record.decode_worker in error["message"]
    assert "emulated fault" in error["message"]
    assert (record.failed_leg, record.http_status) == ("decode", 502)
    assert rig.gateway.stats.failed == 1


@pytest.mark.parametrize("fault", [Faults(reset_after_chunks=5), Faults(end_after_chunks=5)])
async def test_a28_a_cut_after_the_first_byte_is_an_error_event(rig: Any, fault: Faults) -> None:
    await rig.start()
    for name in ("d1", "d2"):
        rig.api(name).faults.set(fault)
    events = await rig.stream(prompt="hello", max_tokens=20)
    assert len(events) == 6
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert error["code"] == "decode_leg_failed"
    record = await rig.control_plane.ended("failed")
    assert record.request_id in error["message"]
    assert record.failed_leg == "decode"
    assert record.ttft_seconds is not None


async def test_a28_a_bad_parameter_of_a_stream_has_its_real_status(rig: Any) -> None:
    await rig.start()
    response = await rig.complete(prompt="hello", stream=True, min_tokens=5, max_tokens=2)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert "min_tokens" in response.json()["error"]["message"]
    assert rig.gateway.cluster.health.paused(time.monotonic()) == []


async def test_a11_a_prefill_reply_without_parameters_falls_back(rig: Any) -> None:
    await rig.start()
    for name in ("p1", "p2"):
        rig.api(name).faults.set(Faults(drop_transfer_params=True))
    assert (await rig.complete(prompt="fox jumps " * 200)).status_code == 200
    assert rig.decode_bodies()[0]["kv_transfer_params"]["perilune"]["num_blocks"] == 0
    assert rig.gateway.stats.handoff_missing == 1


async def test_a30_a_hung_worker_does_not_hold_the_others(rig: Any) -> None:
    rig.timeouts = replace(rig.timeouts, prefill=0.5)
    await rig.start()
    rig.api("p1").faults.set(Faults(hang=True))
    responses = await asyncio.gather(*(rig.complete(prompt=f"n {i}") for i in range(12)))
    assert {response.status_code for response in responses} == {200}
    assert rig.gateway.stats.worker("p1").failures >= 1


async def test_a_leg_past_its_time_names_the_phase(rig: Any) -> None:
    rig.timeouts = replace(rig.timeouts, first_byte=0.3)
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    rig.api("d1").faults.set(Faults(hang=True))
    response = await rig.complete(prompt="hello", stream=True)
    assert response.status_code == 504
    assert "no answer within 0.3 s" in response.json()["error"]["message"]


async def test_a47_a_closed_decode_port_is_503_naming_the_pool(rig: Any) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    await rig.publish(**rig.make_view(d1="launching"))
    response = await rig.complete(prompt="hello")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "no decode worker of model tiny" in response.json()["error"]["message"]


async def test_a54_a_dead_worker_is_skipped_at_once_and_taken_back(
    rig: Any, eventually: Any
) -> None:
    await rig.start()
    await rig.fleet.stop_worker("d1")
    codes = [(await rig.complete(prompt="hello")).status_code for _ in range(20)]
    assert codes == [200] * 20  # connection errors are retried before the first byte
    assert rig.gateway.stats.retries_decode <= 5
    await rig.fleet.restart_worker("d1")
    before = rig.gateway.stats.worker("d1").requests

    async def served_again() -> bool:
        await asyncio.gather(*(rig.complete(prompt="hello") for _ in range(4)))
        return rig.gateway.stats.worker("d1").requests > before + 1

    await eventually(served_again)


async def test_a29_the_first_byte_does_not_wait_for_the_rest(rig: Any) -> None:
    rig.engine = replace(rig.engine, decode_ms=100)
    await rig.start()
    start, arrivals = time.monotonic(), []
    async for _ in rig.events(prompt="hello", max_tokens=12):
        arrivals.append(time.monotonic() - start)
    assert arrivals[-1] > 1.1
    assert arrivals[0] < arrivals[-1] - 0.8


async def test_a_client_that_reads_slowly_slows_the_worker_down(rig: Any, eventually: Any) -> None:
    """Backpressure: what the client does not read, the gateway does not collect."""
    rig.engine = replace(rig.engine, decode_ms=0, prefill_ms_per_token=0)
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port, limit=4096)
    body = {"model": "tiny", "prompt": "x", "stream": True, "n": 60, "max_tokens": 2000,
            "ignore_eos": True}  # fmt: skip
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)

    def paused() -> bool:
        return any(c.write_paused_since for c in rig.gateway.server.connections)

    await eventually(paused, "the gateway stops writing")
    (client,) = rig.gateway.server.connections
    await eventually(lambda: client.relay.reply._paused, "the gateway stops reading")
    held = client._transport.get_write_buffer_size()
    await asyncio.sleep(0.2)
    assert client._transport.get_write_buffer_size() == held < 2_000_000
    for _ in range(200):
        await reader.read(65536)
        if not paused():
            break
    writer.close()
    await eventually(lambda: rig.gateway.stats.in_flight == 0)
