"""The feed: snapshot, events, reset, reconnect."""

from __future__ import annotations

import asyncio
from typing import Any

from console.tui.feed import Feed
from console.viewmodel.state import ConsoleState


class Running:
    """A feed in the background."""

    def __init__(self, source: Any) -> None:
        self.state = ConsoleState()
        self.feed = Feed(source, self.state, asyncio.get_running_loop().time, lambda parts: None)
        self.task = asyncio.create_task(self.feed.run())

    async def __aenter__(self) -> Running:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def until(self, check: Any) -> None:
        async with asyncio.timeout(20):
            while not check():
                assert not self.task.done(), self.task.exception()
                await asyncio.sleep(0.01)


async def test_reads_everything_then_follows(world: Any, make_source: Any) -> None:
    source = make_source(world)
    async with Running(source) as run:
        await run.until(lambda: run.state.snapshot().matrix is not None)
        assert len(run.state.snapshot().nodes) == 12
        source.emit("decision", world.decision(99).model_dump(mode="json"))
        await run.until(lambda: len(run.state.snapshot().decisions) == 31)


async def test_reset_reads_again(world: Any, make_source: Any) -> None:
    source = make_source(world)
    async with Running(source) as run:
        await run.until(lambda: run.state.snapshot().matrix is not None)
        world.nodes.append(world.node(13))
        source.emit("reset", {})
        await run.until(lambda: len(run.state.snapshot().nodes) == 13)


async def test_a_refused_stream_is_said_and_tried_again(
    world: Any, make_source: Any, problem: Any
) -> None:
    source = make_source(world)
    good = source.events

    async def refused(*_: Any) -> Any:
        raise problem(403, "this token may not read events")
        yield

    source.events = refused
    async with Running(source) as run:
        await run.until(lambda: "may not read events" in run.feed.problem)
        assert run.feed.retry_at is not None
        source.events = good
        run.feed.reconnect()
        await run.until(lambda: run.feed.connected)
        assert run.feed.problem == ""


async def test_a_failed_read_leaves_the_rest(world: Any, make_source: Any, problem: Any) -> None:
    source = make_source(world)

    async def broken(window: float = 300) -> Any:
        raise problem(500, "no matrix today")

    source.matrix = broken
    async with Running(source) as run:
        await run.until(lambda: "no matrix today" in run.feed.problem)
        assert len(run.state.snapshot().nodes) == 12
