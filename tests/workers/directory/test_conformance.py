"""What every directory must do: the in-process one and etcd."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from block_lists import batch, run, snapshot

from workers.directory.base import (
    Change,
    Directory,
    LeaseLostError,
    ListTold,
    NodeGone,
    NodeRecord,
    NodeUp,
    OutdatedError,
    Watching,
)
from workers.directory.view import DirectoryView

pytestmark = pytest.mark.xdist_group("etcd")  # one store for all, not one a test process
SHORT_TTL = 1.0
TTL = 30.0


def record(node: str = "n1", incarnation: int = 1) -> NodeRecord:
    return NodeRecord(node, incarnation, [f"unix:/run/{node}.sock"])


class Watcher:
    """Collects what a directory tells."""

    def __init__(self, directory: Directory) -> None:
        self.told: list[Change] = []
        self.view = DirectoryView(grace_seconds=0.0)
        self._directory = directory

    async def run(self) -> None:
        async with contextlib.aclosing(self._directory.changes()) as changes:  # type: ignore[type-var]
            async for change in changes:
                self.told.append(change)
                self.view.take(change, 0.0)

    async def until(self, holds: Callable[["Watcher"], bool], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not holds(self):
                await asyncio.sleep(0.02)


@pytest.fixture
async def watch() -> AsyncIterator[Callable[[Directory], Watcher]]:
    tasks: list[asyncio.Task[None]] = []

    def start(directory: Directory) -> Watcher:
        watcher = Watcher(directory)
        tasks.append(asyncio.create_task(watcher.run()))
        return watcher

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TestNodes:
    async def test_registered_until_withdrawn(
        self, open_directory: Callable[[], Directory]
    ) -> None:
        one, other = open_directory(), open_directory()
        assert await one.nodes() == []
        registration = await one.register(record("n2"), TTL)
        await one.register(record("n1"), TTL)
        assert await other.nodes() == [record("n1"), record("n2")]
        assert 0 < registration.remaining_seconds <= TTL
        await registration.withdraw()
        await registration.withdraw()
        assert await other.nodes() == [record("n1")]

    async def test_not_renewed_is_gone(self, open_directory: Callable[[], Directory]) -> None:
        directory = open_directory()
        registration = await directory.register(record(), SHORT_TTL)
        await registration.tell([snapshot("n1", 1, 1, run(0, 4))])
        async with asyncio.timeout(20):
            while await directory.nodes():
                await asyncio.sleep(0.05)
        assert await directory.lists("n1") == []
        with pytest.raises(LeaseLostError):
            await registration.renew()
        with pytest.raises(LeaseLostError):
            await registration.tell([batch("n1", 1, 2, run(4, 5))])

    async def test_renewed_stays(self, open_directory: Callable[[], Directory]) -> None:
        directory = open_directory()
        registration = await directory.register(record(), SHORT_TTL)
        for _ in range(8):
            await asyncio.sleep(SHORT_TTL / 4)
            await registration.renew()
        assert await directory.nodes() == [record()]

    async def test_d20_younger_life_replaces_and_the_older_is_refused(
        self, open_directory: Callable[[], Directory]
    ) -> None:
        old, new = open_directory(), open_directory()
        first = await old.register(record(incarnation=1), TTL)
        await first.tell([snapshot("n1", 1, 5, run(0, 4))])
        await new.register(record(incarnation=2), TTL)
        assert await new.lists("n1") == []
        with pytest.raises(OutdatedError):
            await first.tell([batch("n1", 1, 6, run(4, 5))])
        with pytest.raises(OutdatedError):
            await old.register(record(incarnation=1), TTL)
        await first.withdraw()
        assert await new.nodes() == [record(incarnation=2)]


class TestLists:
    async def test_in_order_and_replaced_by_a_snapshot(
        self, open_directory: Callable[[], Directory]
    ) -> None:
        directory = open_directory()
        registration = await directory.register(record(), TTL)
        first = [snapshot("n1", 1, 1, run(0, 4)), batch("n1", 1, 2, run(4, 5))]
        await registration.tell(first)
        await registration.tell([batch("n1", 1, 3, run(5, 6))])
        assert await directory.lists("n1") == [*first, batch("n1", 1, 3, run(5, 6))]
        later = snapshot("n1", 1, 9, run(0, 2))
        await registration.tell([later])
        assert await directory.lists("n1") == [later]
        assert await directory.lists("unknown") == []

    async def test_large_lists_travel_in_bounded_pieces(
        self, open_directory: Callable[[], Directory]
    ) -> None:
        directory = open_directory()
        registration = await directory.register(record(), TTL)
        parts = [batch("n1", 1, i + 1, run(i * 10_000, (i + 1) * 10_000)) for i in range(12)]
        await registration.tell([snapshot("n1", 1, 0), *parts])
        assert (await directory.lists("n1"))[1:] == parts


class TestChanges:
    async def test_everything_first_then_what_comes(
        self, open_directory: Callable[[], Directory], watch: Callable[[Directory], Watcher]
    ) -> None:
        writer = open_directory()
        registration = await writer.register(record(), TTL)
        part = snapshot("n1", 1, 1, run(0, 4))
        await registration.tell([part])
        watcher = watch(open_directory())
        await watcher.until(lambda w: Watching("current") in w.told)
        assert watcher.told == [NodeUp(record()), ListTold(part), Watching("current")]
        await registration.tell([batch("n1", 1, 2, run(4, 6))])
        await watcher.until(lambda w: w.view.index.num_blocks() == 6)
        await registration.withdraw()
        await watcher.until(lambda w: NodeGone("n1") in w.told)

    async def test_new_life_is_told(
        self, open_directory: Callable[[], Directory], watch: Callable[[Directory], Watcher]
    ) -> None:
        writer = open_directory()
        registration = await writer.register(record(), TTL)
        await registration.tell([snapshot("n1", 1, 1, run(0, 4))])
        watcher = watch(open_directory())
        await watcher.until(lambda w: w.view.index.num_blocks() == 4)
        await writer.register(record(incarnation=2), TTL)
        await watcher.until(lambda w: w.view.nodes == {"n1": record(incarnation=2)})
        assert watcher.view.index.num_blocks() == 0
        assert not watcher.view.suspect_since


class TestLeader:
    async def test_one_leads_and_writes_under_its_fence(
        self, open_directory: Callable[[], Directory]
    ) -> None:
        one, other = open_directory(), open_directory()
        first = await one.campaign("control-plane", "one", TTL)
        assert first is not None
        assert await other.campaign("control-plane", "other", TTL) is None
        assert await other.leader("control-plane") == "one"
        await first.write("epoch", b"1")
        await first.renew()
        await first.resign()
        second = await other.campaign("control-plane", "other", TTL)
        assert second is not None
        assert second.fence > first.fence
        with pytest.raises(OutdatedError):
            await first.write("epoch", b"stale")
        assert await one.read("epoch") == b"1"
        assert await one.read("unknown") is None

    async def test_lease_that_ends_lets_another_lead(
        self, open_directory: Callable[[], Directory]
    ) -> None:
        one, other = open_directory(), open_directory()
        first = await one.campaign("control-plane", "one", SHORT_TTL)
        assert first is not None
        async with asyncio.timeout(20):
            while (second := await other.campaign("control-plane", "other", TTL)) is None:
                await asyncio.sleep(0.05)
        assert first.remaining_seconds <= 0
        with pytest.raises(LeaseLostError):
            await first.renew()
        assert await one.leader("control-plane") == "other"
        await second.resign()
