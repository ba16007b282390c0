"""Addresses, messages, the view and the publisher, without etcd."""

import asyncio
from collections.abc import Iterator

import pytest
from aetcd.rpc import kv_pb2, rpc_pb2
from block_lists import SPACE, batch, key, run, snapshot

from workers.core.clock import ManualClock
from workers.core.errors import ConfigError
from workers.core.ids import BlockHash
from workers.core.messages import BlocksStored, EventBatch, Snapshot
from workers.directory import publisher as publisher_module
from workers.directory.address import parse_directory
from workers.directory.base import (
    DirectoryReadOnlyError,
    ListTold,
    NodeGone,
    NodeRecord,
    NodeUp,
    Watching,
)
from workers.directory.etcd_client import prefix_end
from workers.directory.etcd_messages import MESSAGES
from workers.directory.memory import MemoryDirectory, MemoryStore
from workers.directory.publisher import DirectoryPublisher, PublisherSettings
from workers.directory.view import DirectoryView

CHAIN = [BlockHash(key(i)) for i in range(100)]


class TestAddress:
    def test_hosts_and_tls(self) -> None:
        assert parse_directory("etcd://a:1,[::1]:2").endpoints == ("a:1", "[::1]:2")
        assert not parse_directory("etcd://a:1").uses_tls
        tls = parse_directory("etcd://a:1?ca=/c.pem&cert=/a.pem&key=/k.pem")
        assert tls.uses_tls
        assert (str(tls.ca), str(tls.certificate), str(tls.key)) == ("/c.pem", "/a.pem", "/k.pem")

    @pytest.mark.parametrize(
        "text",
        ["", "http://a:1", "etcd://", "etcd://a", "etcd://a:1,", "etcd://a:99999",
         "etcd://a:1?x=1", "etcd://a:1?cert=/a.pem"],
    )  # fmt: skip
    def test_what_cannot_work_names_the_way_out(self, text: str) -> None:
        with pytest.raises(ConfigError, match="etcd://HOST:PORT"):
            parse_directory(text)


def test_messages_are_etcds_own() -> None:
    """Field by field, against the generated ones of another client."""
    for name, ours in MESSAGES.items():
        theirs = getattr(rpc_pb2, name, None) or getattr(kv_pb2, name)
        for field in ours.DESCRIPTOR.fields:
            twin = theirs.DESCRIPTOR.fields_by_name[field.name]
            assert twin.number == field.number, (name, field.name)
            assert twin.is_repeated == field.is_repeated, (name, field.name)
            assert twin.type == field.type or twin.enum_type is not None, (name, field.name)


def test_end_of_a_prefix() -> None:
    assert prefix_end(b"/a/") == b"/a0"
    assert prefix_end(b"a\xff") == b"b"
    assert prefix_end(b"\xff") == b"\0"


class TestView:
    def test_rebuilding_until_all_is_told(self) -> None:
        view = DirectoryView()
        view.take(Watching("lost", "no answer"), 0.0)
        assert (view.state, view.reason) == ("rebuilding", "no answer")
        view.take(NodeUp(NodeRecord("n1", 1)), 0.0)
        view.take(ListTold(snapshot("n1", 1, 3, run(0, 5))), 0.0)
        view.take(Watching("current"), 0.0)
        assert (view.state, view.reason) == ("current", "")
        assert view.index.held_lengths(SPACE, CHAIN) == {"n1": 5}

    def test_vanished_node_is_suspect_before_it_is_gone(self) -> None:
        view = DirectoryView(grace_seconds=30.0)
        view.take(Watching("current"), 0.0)
        view.take(NodeUp(NodeRecord("n1", 1)), 0.0)
        view.take(ListTold(snapshot("n1", 1, 3, run(0, 5))), 0.0)
        view.take(NodeGone("n1"), 10.0)
        assert view.sweep(39.0) == []
        assert list(view.suspect_since) == ["n1"]
        assert view.index.held_lengths(SPACE, CHAIN) == {"n1": 5}
        assert view.sweep(40.0) == ["n1"]
        assert view.nodes == {}
        assert view.index.nodes() == []

    def test_node_that_comes_back_in_time_keeps_everything(self) -> None:
        view = DirectoryView(grace_seconds=30.0)
        view.take(Watching("current"), 0.0)
        view.take(NodeUp(NodeRecord("n1", 1)), 0.0)
        view.take(ListTold(snapshot("n1", 1, 3, run(0, 5))), 0.0)
        view.take(NodeGone("n1"), 10.0)
        view.take(NodeUp(NodeRecord("n1", 1)), 20.0)
        assert view.sweep(100.0) == []
        assert view.index.held_lengths(SPACE, CHAIN) == {"n1": 5}

    def test_while_the_store_is_silent_nobody_goes(self) -> None:
        view = DirectoryView(grace_seconds=30.0)
        view.take(Watching("current"), 0.0)
        view.take(NodeUp(NodeRecord("n1", 1)), 0.0)
        view.take(NodeGone("n1"), 10.0)
        view.take(Watching("lost", "silent"), 11.0)
        assert view.sweep(1000.0) == []
        view.take(Watching("current"), 1001.0)
        assert view.sweep(1002.0) == []
        assert view.sweep(1030.0) == ["n1"]

    def test_older_record_and_gaps_change_nothing(self) -> None:
        view = DirectoryView()
        view.take(NodeUp(NodeRecord("n1", 2)), 0.0)
        view.take(ListTold(snapshot("n1", 2, 3, run(0, 5))), 0.0)
        view.take(NodeUp(NodeRecord("n1", 1)), 0.0)
        view.take(ListTold(batch("n1", 2, 9, run(5, 6))), 0.0)
        assert view.nodes == {"n1": NodeRecord("n1", 2)}
        assert view.list_gaps == 1
        assert view.index.held_lengths(SPACE, CHAIN) == {"n1": 5}


class Log:
    """A node's events, of which only the last ones are kept."""

    def __init__(self) -> None:
        self.incarnation, self.sequence, self.blocks = 1, 0, 0
        self.batches: list[EventBatch] = []

    def store(self, count: int = 1) -> None:
        event = run(self.blocks, self.blocks + count)
        self.blocks, self.sequence = self.blocks + count, self.sequence + 1
        self.batches.append(EventBatch("n1", 1, self.sequence, [event]))

    def runs(self) -> list[BlocksStored]:
        return [run(0, self.blocks)] if self.blocks else []

    def since(self, incarnation: int, sequence: int) -> list[EventBatch] | None:
        missed = [each for each in self.batches if each.sequence > sequence]
        return missed if missed and missed[0].sequence == sequence + 1 else None

    def snapshot(self, runs: list[BlocksStored]) -> Iterator[Snapshot]:
        yield Snapshot("n1", 1, self.sequence, True, True, runs)


class Publishing:
    def __init__(self, store: MemoryStore, log: Log) -> None:
        settings = PublisherSettings(
            ttl_seconds=30.0, list_seconds=0.01, tick_seconds=0.005, read_only_seconds=0.01,
            min_snapshot_seconds=0.0,
        )  # fmt: skip
        self.log = log
        self.directory = MemoryDirectory(store)
        self.publisher = DirectoryPublisher(
            self.directory, NodeRecord("n1", 1), log, log.runs, settings
        )

    async def listed(self) -> int:
        view = DirectoryView()
        for part in await self.directory.lists("n1"):
            view.take(ListTold(part), 0.0)
        return view.index.num_blocks()

    async def until_listed(self) -> None:
        async with asyncio.timeout(20):
            while await self.listed() != self.log.blocks:
                await asyncio.sleep(0.005)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(ManualClock())


class TestPublisher:
    async def test_follows_the_log_and_withdraws_at_the_end(self, store: MemoryStore) -> None:
        rig = Publishing(store, Log())
        task = asyncio.create_task(rig.publisher.run())
        for _ in range(5):
            rig.log.store(3)
            await rig.until_listed()
        assert await rig.directory.nodes() == [NodeRecord("n1", 1)]
        parts = await rig.directory.lists("n1")
        assert [type(part) for part in parts][:1] == [Snapshot]
        assert len(parts) > 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await rig.directory.nodes() == []

    async def test_forgotten_events_and_long_lists_end_in_a_snapshot(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(publisher_module, "MAX_DELTAS", 5)
        rig = Publishing(store, Log())
        task = asyncio.create_task(rig.publisher.run())
        rig.log.store()
        for i in range(30):
            rig.log.store()
            if i % 10 == 9:
                rig.log.batches.clear()  # the ring has moved on
                rig.log.store()
            await rig.until_listed()
            assert len(await rig.directory.lists("n1")) <= 7
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def test_lost_lease_is_a_new_registration(self, store: MemoryStore) -> None:
        rig = Publishing(store, Log())
        task = asyncio.create_task(rig.publisher.run())
        rig.log.store()
        await rig.until_listed()
        assert isinstance(store.clock, ManualClock)
        store.clock.advance(60.0)
        store.expire()
        rig.log.store()
        await rig.until_listed()
        assert rig.publisher.state.registrations == 2
        assert rig.publisher.state.leases_lost == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def test_read_only_store_is_asked_again(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = Publishing(store, Log())
        task = asyncio.create_task(rig.publisher.run())
        rig.log.store()
        await rig.until_listed()
        tell = store.tell

        def full(change: object) -> None:
            raise DirectoryReadOnlyError("no space")

        monkeypatch.setattr(store, "tell", full)
        rig.log.store()
        async with asyncio.timeout(20):
            while rig.publisher.state.state != "read_only":
                await asyncio.sleep(0.005)
        monkeypatch.setattr(store, "tell", tell)
        rig.log.store()
        await rig.until_listed()
        async with asyncio.timeout(20):
            while rig.publisher.state.state != "registered":
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
