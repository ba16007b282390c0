"""What operators see of running requests, and how they end one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from controlplane.gateway import watch
from controlplane.gateways.asking import GatewayClient, GatewayError, NotRunningError
from workers.engines.emulated.faults import Faults

OPERATOR = {"authorization": "Bearer secret", "x-perilune-actor": "ana"}


async def listing(rig: Any) -> dict[str, Any]:
    reply = await rig.client.get("/debug/requests", headers=OPERATOR)
    assert reply.status_code == 200
    found: dict[str, Any] = reply.json()
    return found


async def cancel(rig: Any, request_id: str) -> Any:
    return await rig.client.post(f"/debug/requests/{request_id}/cancel", headers=OPERATOR)


async def hanging(rig: Any, eventually: Any, leg: str, **body: Any) -> asyncio.Task[Any]:
    for name in ("p1", "p2") if leg == "prefill" else ("d1", "d2"):
        rig.api(name).faults.set(Faults(hang=True))
    task = asyncio.create_task(rig.complete(prompt="hello there", **body))
    state = "prefilling" if leg == "prefill" else "decoding"

    async def is_there() -> bool:
        return [row["state"] for row in (await listing(rig))["requests"]] == [state]

    for _ in range(500):
        if await is_there():
            return task
        await asyncio.sleep(0.02)
    raise AssertionError(await listing(rig))


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_operator_ends_a_request_that_waits_for_a_leg(
    rig: Any, eventually: Any, leg: str
) -> None:
    await rig.start()
    task = await hanging(rig, eventually, leg)
    found = await listing(rig)
    (row,) = found["requests"]
    assert (found["gateway"], found["running"]) == (rig.gateway.settings.gateway_id, 1)
    assert row["at_bound"] == "end"
    assert row["prompt_tokens"] > 0
    reply = await cancel(rig, row["request_id"])
    assert reply.status_code == 200
    assert reply.json()["waits_for"] == row["waits_for"]
    answer = await task
    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["code"], error["request_id"]) == ("cancelled_by_operator", row["request_id"])
    assert "ana" in error["message"]
    record = await rig.control_plane.ended("cancelled")
    assert "operator" in record.error
    stats = rig.gateway.stats
    assert (stats.cancelled, stats.failed) == (1, 0)
    assert sum(worker.failures for worker in stats.workers.values()) == 0
    await eventually(lambda: stats.in_flight == 0)
    assert (await listing(rig))["requests"] == []


async def test_a_stream_that_has_begun_is_told_in_its_stream(rig: Any, eventually: Any) -> None:
    rig.engine = replace(rig.engine, decode_ms=20)
    await rig.start()
    events: list[str] = []

    async def read() -> None:
        async for event in rig.events(prompt="hello there", max_tokens=2000, ignore_eos=True):
            events.append(event)

    task = asyncio.create_task(read())
    await eventually(lambda: len(events) > 3)
    (row,) = (await listing(rig))["requests"]
    assert (await cancel(rig, row["request_id"])).status_code == 200
    async with asyncio.timeout(10):
        await asyncio.gather(task, return_exceptions=True)
    assert any("cancelled_by_operator" in event for event in events)
    record = await rig.control_plane.ended("cancelled")
    assert record.failed_leg == ""
    assert rig.gateway.stats.failed == 0
    await eventually(
        lambda: sum(api.worker.counters.running for api in rig.fleet.apis.values()) == 0
    )


async def test_what_does_not_run_cannot_be_cancelled_and_nobody_else_may(
    rig: Any, eventually: Any
) -> None:
    await rig.start()
    assert (await cancel(rig, "nonsense")).status_code == 404
    task = await hanging(rig, eventually, "decode")
    (row,) = (await listing(rig))["requests"]
    path = f"/debug/requests/{row['request_id']}/cancel"
    assert (await rig.client.post(path)).status_code == 401
    assert (await rig.client.get(path, headers=OPERATOR)).status_code == 405
    assert (await rig.client.post("/debug/requests", headers=OPERATOR)).status_code == 405
    assert (await rig.client.get("/debug/requests/x/y", headers=OPERATOR)).status_code == 404
    assert not task.done()
    assert (await cancel(rig, row["request_id"])).status_code == 200
    assert (await task).status_code == 503
    assert (await cancel(rig, row["request_id"])).status_code == 404


async def test_one_that_does_not_end_when_told_is_closed_from_outside(
    rig: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "FORCE_SECONDS", 0.1)
    await rig.start()
    task = await hanging(rig, eventually, "decode")
    (row,) = (await listing(rig))["requests"]
    run = rig.gateway._context.running[row["request_id"]]
    monkeypatch.setattr(run.asked.request.connection, "cancel", lambda: None, raising=False)
    assert (await cancel(rig, row["request_id"])).status_code == 200
    await eventually(lambda: not rig.gateway._context.running)
    await asyncio.gather(task, return_exceptions=True)


async def test_stuck_ones_are_listed_whatever_their_age(
    rig: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_LISTED", 1)
    await rig.start()
    first = await hanging(rig, eventually, "decode")
    second = asyncio.create_task(rig.complete(prompt="hello again"))
    await eventually(lambda: len(rig.gateway._context.running) == 2)
    youngest = list(rig.gateway._context.running)[-1]
    rig.gateway._context.running[youngest].stuck_since = 1.0
    found = await listing(rig)
    assert (found["running"], [row["request_id"] for row in found["requests"]]) == (2, [youngest])
    assert json.dumps(found)
    for name in list(rig.gateway._context.running):
        await cancel(rig, name)
    await asyncio.gather(first, second)


async def test_loads_say_how_often_a_worker_failed_lately(rig: Any) -> None:
    await rig.start()
    health = rig.gateway.cluster.health
    loop_now = asyncio.get_running_loop().time()
    for _ in range(3):
        health.failed("d1", loop_now, unreachable=False, error="answered 500")
    load = rig.gateway.cluster.loads()["d1"]
    assert (load.data_path, load.failures_in_a_row) == ("ejected", 3)
    assert (load.outcomes, load.outcomes_failed) == (3, 3)
    assert 0 < load.pause_seconds <= 1.0
    sound = rig.gateway.cluster.loads()["d2"]
    assert (sound.outcomes, sound.failures_in_a_row, sound.pause_seconds) == (0, 0, 0.0)


async def test_the_control_plane_reads_and_cancels_at_a_real_gateway(
    rig: Any, eventually: Any
) -> None:
    await rig.start()
    task = await hanging(rig, eventually, "decode")
    client, url = GatewayClient("secret"), f"http://127.0.0.1:{rig.gateway.server.port}"
    try:
        found = await client.listing(rig.gateway.settings.gateway_id, url)
        (row,) = found.requests
        assert (row.state, row.at_bound, found.running) == ("decoding", "end", 1)
        assert row.bound_seconds is not None
        assert row.wait_seconds is not None
        with pytest.raises(GatewayError, match="leads to gateway"):
            await client.listing("another", url)
        assert (await client.cancel(url, row.request_id, "ben")).state == "decoding"
        assert "ben" in (await task).json()["error"]["message"]
        with pytest.raises(NotRunningError):
            await client.cancel(url, row.request_id, "ben")
    finally:
        await client.close()
