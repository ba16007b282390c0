"""Clients that leave: both legs end within a second, whatever they were doing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest

from workers.engines.emulated.faults import Faults


async def send_raw(rig: Any, **body: Any) -> asyncio.StreamWriter:
    """A request on a socket of its own, to be closed at will."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    payload = json.dumps({"model": "tiny", "prompt": "hello there", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    writer.reader = reader  # type: ignore[attr-defined]
    return writer


def running(rig: Any) -> int:
    return sum(api.worker.counters.running for api in rig.fleet.apis.values())


async def gone_within_a_second(rig: Any, eventually: Any) -> None:
    start = asyncio.get_running_loop().time()
    await eventually(lambda: running(rig) == 0 and rig.gateway.stats.in_flight == 0)
    assert asyncio.get_running_loop().time() - start < 1.0


async def test_a51_a_client_that_drops_a_stream_ends_the_engines_work(
    rig: Any, eventually: Any
) -> None:
    rig.engine = replace(rig.engine, decode_ms=5)
    await rig.start()
    count = 0
    events = rig.events(prompt="hello there", max_tokens=2000, ignore_eos=True)
    async with contextlib.aclosing(events):
        async for _ in events:
            count += 1
            if count == 20:
                break
    await gone_within_a_second(rig, eventually)
    record = await rig.control_plane.ended("cancelled")
    assert record.decode_worker
    assert rig.gateway.stats.cancelled == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a52_leaving_before_the_first_byte_ends_both_legs(
    rig: Any, eventually: Any, stream: bool, leg: str
) -> None:
    await rig.start()
    slow = ("p1", "p2") if leg == "prefill" else ("d1", "d2")
    for name in slow:
        rig.api(name).faults.set(Faults(hang=True))
    writer = await send_raw(rig, stream=stream)
    await eventually(lambda: any(rig.api(name).worker.counters.running for name in slow))
    writer.close()
    await gone_within_a_second(rig, eventually)
    assert sum(rig.api(name).worker.counters.aborted for name in slow) == 1
    await rig.control_plane.ended("cancelled")
    if leg == "prefill":
        assert rig.decode_bodies() == []


async def test_a52_leaving_while_waiting_for_a_slot(rig: Any, eventually: Any) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    rig.policies = [rig.policy("scheduling", max_concurrent_per_decode=1)]
    await rig.start()
    rig.api("d1").faults.set(Faults(hang=True, times=1))
    first = await send_raw(rig)
    await eventually(lambda: rig.api("d1").worker.counters.running == 1)
    second = await send_raw(rig)
    await eventually(lambda: rig.gateway.cluster.slots.num_waiting == 1)
    second.close()
    await eventually(lambda: rig.gateway.cluster.slots.num_waiting == 0)
    first.close()
    await gone_within_a_second(rig, eventually)
    assert (await rig.complete(prompt="hello")).status_code == 200


async def test_a39_nothing_is_left_after_many_aborts(rig: Any, eventually: Any) -> None:
    rig.engine = replace(rig.engine, decode_ms=2)
    await rig.start()

    async def one(i: int) -> None:
        writer = await send_raw(rig, stream=i % 2 == 0, max_tokens=30)
        if i % 3 == 0:
            await asyncio.sleep(0.003 * (i % 10))
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await writer.reader.readuntil(b"finish_reason")  # type: ignore[attr-defined]
        writer.close()

    for start in range(0, 90, 15):
        await asyncio.gather(*(one(i) for i in range(start, start + 15)))
    await eventually(lambda: running(rig) == 0 and rig.gateway.stats.in_flight == 0)
    cluster = rig.gateway.cluster
    assert cluster._waiters == {}
    assert all(w.prefill_queue.tokens == 0 for w in cluster.workers.values())
    await eventually(lambda: not rig.gateway.server.connections)
