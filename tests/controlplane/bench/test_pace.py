"""Requests of the bench are sent when they should be."""

from __future__ import annotations

import asyncio
import gc
import os
import time

import pytest
from serving import Serving

from controlplane.bench.gateway_load import Kind, at_rate, body_of, prompts
from controlplane.bench.pace import Pace
from controlplane.bench.upstream import CannedWorker


async def test_never_early_and_at_once_where_it_is_past() -> None:
    with Pace() as pace:
        for wait in (0.0003, 0.0, 0.0021, -1.0, 0.00001, 1.02):
            at = time.perf_counter() + wait
            async with asyncio.timeout(20):
                await pace.until(at)
            assert time.perf_counter() >= at


async def test_who_is_cancelled_leaves_a_timer_that_can_be_used() -> None:
    with Pace() as pace:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pace.until(time.perf_counter() + 60)
        async with asyncio.timeout(20):
            await pace.until(time.perf_counter() + 0.001)


async def test_nothing_of_it_stays_open() -> None:
    before = os.listdir("/proc/self/fd")
    with Pace() as pace:
        await pace.until(time.perf_counter() + 0.001)
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    assert len(os.listdir("/proc/self/fd")) == len(before)


async def test_at_a_rate_none_is_sent_before_its_slot() -> None:
    """And all are answered, whichever loop runs it."""
    came: list[float] = []

    class Worker(CannedWorker):
        def answer(self, head: bytes, body: bytes) -> None:
            came.append(time.perf_counter())
            super().answer(head, body)

    kind, rate = Kind(300, stream=False), 200.0
    server = Serving(Worker)
    port = await server.start()
    bodies = [body_of(kind, prompt) for prompt in prompts(kind, 40, 1)]
    begun = time.perf_counter()
    timed = await at_rate((port,), bodies, rate, 1)
    await server.stop()
    assert len(timed.first_bytes) == len(came) == 40
    assert all(at >= begun + number / rate for number, at in enumerate(came))


async def test_who_was_held_up_sends_no_burst() -> None:
    """What was due meanwhile is sent later, each in its slot: together it would wait for itself."""
    sent_at: list[float] = []

    class Worker(CannedWorker):
        def answer(self, head: bytes, body: bytes) -> None:
            if len(sent_at) == 5:
                time.sleep(0.3)  # the sender is of this loop
            sent_at.append(time.perf_counter())
            super().answer(head, body)

    kind, rate = Kind(300, stream=False), 100.0
    server = Serving(Worker)
    port = await server.start()
    bodies = [body_of(kind, prompt) for prompt in prompts(kind, 40, 1)]
    timed = await at_rate((port,), bodies, rate, 1)
    await server.stop()
    assert timed.held_up_seconds >= 0.25
    assert sent_at[-1] - sent_at[6] >= (len(sent_at) - 10) / rate
    assert timed.seconds >= 0.25 + (len(bodies) - 1) / rate
    assert gc.isenabled()
