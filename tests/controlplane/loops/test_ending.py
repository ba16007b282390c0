"""Tasks end, though a cancellation gets lost; and who ends them does not wait for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controlplane.feed import Feed
from controlplane.loops import ending
from controlplane.loops.auditor import Auditor, _Followed
from controlplane.loops.ending import end_tasks
from workers.client import make_hello
from workers.client_async import AsyncAgentClient
from workers.core.prefix_index import PrefixIndex


async def stubborn(num_swallowed: int) -> None:
    """Loses so many cancellations."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            num_swallowed -= 1
            if num_swallowed < 0:
                raise


async def fails() -> None:
    raise ValueError("by itself")


async def started(*works: Any) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(work) for work in works]
    await asyncio.sleep(0)
    return tasks


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "AGAIN_SECONDS", 0.01)


async def test_all_end_however_stubborn() -> None:
    tasks = await started(stubborn(0), stubborn(1), stubborn(3), fails())
    async with asyncio.timeout(30):
        await end_tasks(tasks)
    assert all(task.done() for task in tasks)


async def test_nothing_to_end() -> None:
    await end_tasks([])


async def test_an_auditor_ends_a_feed_that_loses_its_cancellation(api: Any) -> None:
    auditor = Auditor(api.plane)
    client = AsyncAgentClient("/nowhere/agent.sock", make_hello("cli", "test"))
    tasks = await started(stubborn(2), stubborn(0))
    for number, task in enumerate(tasks):
        feed = Feed(client, PrefixIndex())
        auditor._followed[f"n{number}"] = _Followed("/nowhere", feed, task)
    async with asyncio.timeout(30):
        await auditor.close()
    assert all(task.done() for task in tasks)
    assert not auditor._followed


async def test_a_pass_cut_short_leaves_the_feed_to_the_next(api: Any) -> None:
    auditor = Auditor(api.plane)
    client = AsyncAgentClient("/nowhere/agent.sock", make_hello("cli", "test"))
    [task] = await started(stubborn(3))
    auditor._followed["gone"] = _Followed("/nowhere", Feed(client, PrefixIndex()), task)
    [cut] = await started(auditor.step())
    await end_tasks([cut])
    assert "gone" in auditor._followed
    async with asyncio.timeout(30):
        await auditor.step()
    assert task.done()
    assert "gone" not in auditor._followed
