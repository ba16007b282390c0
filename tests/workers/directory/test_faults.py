"""A real etcd with three members that are killed, stopped, restarted and starved.

The nodes' lookups are answered by an index in memory throughout: that is measured, not assumed.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import grpc.aio
import pytest
from block_lists import SPACE, key, run
from etcd_cluster import EtcdCluster, Member, etcd_binary

from workers.clock import SystemClock
from workers.core.ids import BlockHash
from workers.core.messages import BlocksStored, EventBatch, KvEvent, Snapshot
from workers.directory.base import (
    CompactedError,
    DirectoryError,
    DirectoryReadOnlyError,
    NodeRecord,
)
from workers.directory.etcd import EtcdDirectory
from workers.directory.etcd_client import Bounds, EtcdClient
from workers.directory.publisher import DirectoryPublisher, PublisherSettings
from workers.directory.view import DirectoryView

pytestmark = [pytest.mark.heavy, pytest.mark.xdist_group("etcd")]
TTL = 2.0
BOUNDS = Bounds(a_try=0.5, a_call=5.0, silence=2.5, progress=0.5)
SETTINGS = PublisherSettings(
    ttl_seconds=TTL, list_seconds=0.1, tick_seconds=0.05, read_only_seconds=0.5,
    min_snapshot_seconds=0.2,
)  # fmt: skip
CHAIN = [BlockHash(key(i)) for i in range(500)]


class Source:
    """A node's event log in small: what `EventLog` of the agent does, without an agent."""

    def __init__(self, node: str, incarnation: int) -> None:
        self.node, self.incarnation, self.sequence = node, incarnation, 0
        self.blocks = 0
        self._batches: list[EventBatch] = []

    def store(self, count: int = 1) -> None:
        event: KvEvent = run(self.blocks, self.blocks + count)
        self.blocks += count
        self.sequence += 1
        self._batches.append(EventBatch(self.node, self.incarnation, self.sequence, [event]))

    def runs(self) -> list[BlocksStored]:
        return [run(0, self.blocks)] if self.blocks else []

    def since(self, incarnation: int, sequence: int) -> list[EventBatch] | None:
        return [batch for batch in self._batches if batch.sequence > sequence]

    def snapshot(self, runs: list[BlocksStored]) -> Iterator[Snapshot]:
        yield Snapshot(self.node, self.incarnation, self.sequence, True, True, runs)


@dataclass
class Rig:
    """Nodes that publish, a reader, and a request path that looks up all the time."""

    etcd: EtcdCluster
    cluster: str
    view: DirectoryView = field(default_factory=lambda: DirectoryView(grace_seconds=3 * TTL))
    sources: dict[str, Source] = field(default_factory=dict)
    publishers: dict[str, DirectoryPublisher] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    slowest_lookup: float = 0.0
    lookups: int = 0
    states: list[str] = field(default_factory=list)
    blocks_when_current: int | None = None
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def directory(self) -> EtcdDirectory:
        client = EtcdClient(self.etcd.endpoints, bounds=BOUNDS)
        return EtcdDirectory(client, self.cluster, SystemClock())

    def start(self, name: str, loop: object) -> None:
        self._tasks[name] = asyncio.create_task(loop, name=name)  # type: ignore[arg-type]

    def node(self, node: str, incarnation: int = 1, blocks: int = 10) -> Source:
        source = self.sources[node] = Source(node, incarnation)
        source.store(blocks)
        record = NodeRecord(node, incarnation, [f"unix:/run/{node}.sock"])
        publisher = self.publishers[node] = DirectoryPublisher(
            self.directory(), record, source, source.runs, SETTINGS
        )
        self.start(node, publisher.run())
        return source

    async def read(self) -> None:
        directory = self.directory()
        try:
            async with contextlib.aclosing(directory.changes()) as changes:  # type: ignore[type-var]
                async for change in changes:
                    self.view.take(change, time.monotonic())
                    if self.view.state == "current" and self.blocks_when_current is None:
                        self.blocks_when_current = self.view.index.num_blocks()
                    if not self.states or self.states[-1] != self.view.state:
                        self.states.append(self.view.state)
        finally:
            await directory.close()

    async def look_up(self) -> None:
        while True:
            started = time.perf_counter()
            self.view.index.held_lengths(SPACE, CHAIN)
            self.slowest_lookup = max(self.slowest_lookup, time.perf_counter() - started)
            self.lookups += 1
            self.gone += self.view.sweep(time.monotonic())
            await asyncio.sleep(0.002)

    def converged(self) -> bool:
        index, known = self.view.index, set(self.view.index.nodes())
        return self.view.state == "current" and all(
            node in known and index.num_blocks(node) == source.blocks  # type: ignore[arg-type]
            for node, source in self.sources.items()
        )

    async def until(self, holds: Callable[[], bool], what: str, seconds: float = 40.0) -> float:
        """Seconds that it took."""
        started = time.monotonic()
        while not holds():
            assert time.monotonic() - started < seconds, f"not within {seconds:g} s: {what}"
            await asyncio.sleep(0.02)
        return time.monotonic() - started

    async def settled(self) -> None:
        await self.until(self.converged, "the directory converges")

    async def end(self, name: str) -> None:
        """As kill -9 of that process: nothing is withdrawn."""
        publisher = self.publishers.pop(name, None)
        if publisher is not None:
            await publisher._directory.close()  # its withdrawal then fails
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


@pytest.fixture
async def rig(etcd: EtcdCluster, cluster_name: str) -> AsyncIterator[Rig]:
    rig = Rig(etcd, f"faults-{cluster_name}")
    rig.start("reader", rig.read())
    rig.start("lookups", rig.look_up())
    yield rig
    await rig.close()
    for member in etcd.members:
        member.resume()


async def leader_of(etcd: EtcdCluster) -> Member:
    """Asks each member who leads."""
    for _ in range(100):
        for member in etcd.members:
            async with grpc.aio.insecure_channel(member.endpoint) as channel:
                call = channel.unary_unary("/etcdserverpb.Maintenance/Status")
                with contextlib.suppress(grpc.aio.AioRpcError):
                    status = _fields(await call(b"", timeout=0.5))
                    own = _fields(status[1])[2]
                    if status.get(4) == own:
                        return member
        await asyncio.sleep(0.1)
    raise AssertionError("etcd has no leader")


def _fields(message: bytes) -> dict[int, object]:
    """Top-level fields of a protobuf message: numbers and bytes."""
    fields: dict[int, object] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = number()
        if tag & 7 == 0:
            fields[tag >> 3] = number()
        else:
            length = number()
            fields[tag >> 3] = message[at : at + length]
            at += length
    return fields


class Writes:
    """Guarded writes in a row, timed; each must end within the bound."""

    def __init__(self, directory: EtcdDirectory) -> None:
        self._directory = directory
        self.seconds: list[float] = []
        self.failures = 0
        self.outage = 0.0  # longest time without a success

    async def run(self) -> None:
        leadership = None
        last = time.monotonic()
        while True:
            started = time.monotonic()
            try:
                if leadership is None:
                    leadership = await self._directory.campaign("writer", "w", 60.0)
                if leadership is not None:
                    await leadership.write("x", str(started).encode())
                    self.outage = max(self.outage, time.monotonic() - last)
                    last = time.monotonic()
            except DirectoryError:
                self.failures += 1
            self.seconds.append(time.monotonic() - started)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_leader_lost_under_load(
    rig: Rig, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [rig.node(f"n{i}") for i in range(3)]
    writes = Writes(rig.directory())
    rig.start("writes", writes.run())
    await rig.settled()
    leader = await leader_of(rig.etcd)
    before = rig.lookups
    if how == "killed":
        leader.kill()
    else:
        leader.pause()
    for source in sources:
        source.store()
    converged = await rig.until(rig.converged, "the directory converges without its leader")
    for _ in range(20):
        for source in sources:
            source.store()
        await asyncio.sleep(0.1)
    await rig.settled()
    if how == "killed":
        leader.start()
    else:
        leader.resume()
    for source in sources:
        source.store()
    await rig.settled()
    assert rig.lookups > before
    assert rig.slowest_lookup < 1.0  # the loop itself is busy at times
    assert max(writes.seconds) < BOUNDS.a_call + 2 * BOUNDS.a_try + 1.0
    assert rig.gone == []
    with capsys.disabled():
        print(
            f"\nleader {how}: longest time without a write {writes.outage:.2f} s, slowest call "
            f"{max(writes.seconds):.2f} s, median {1e3 * statistics.median(writes.seconds):.1f} ms, "
            f"news of all nodes through after {converged:.2f} s; slowest lookup "
            f"{1e3 * rig.slowest_lookup:.2f} ms of {rig.lookups}"
        )


async def test_d01_store_paused_for_longer_than_the_lease(rig: Rig) -> None:
    sources = [rig.node(f"n{i}") for i in range(3)]
    await rig.settled()
    for member in rig.etcd.members:
        member.pause()
    before = rig.lookups
    for _ in range(15):
        sources[0].store()
        await asyncio.sleep(TTL * 1.5 / 15)
        assert len(rig.view.nodes) == 3  # routing goes on with the last known state
    for member in rig.etcd.members:
        member.resume()
    await rig.settled()
    assert rig.lookups > before
    assert rig.gone == []
    assert set(rig.view.nodes) == {"n0", "n1", "n2"}


async def test_d02_outage_of_twice_the_lease_ends_in_a_new_lease(rig: Rig) -> None:
    source = rig.node("n0")
    await rig.settled()
    directory = rig.directory()
    known, _ = await directory._client.get(directory._root + b"nodes/n0")
    assert known is not None
    for member in rig.etcd.members:
        member.pause()
    await asyncio.sleep(2 * TTL)
    for member in rig.etcd.members:
        member.resume()
    source.store()
    await rig.until(lambda: rig.publishers["n0"].state.registrations >= 2, "registers again")
    await rig.settled()
    again, _ = await directory._client.get(directory._root + b"nodes/n0")
    assert again is not None
    assert again.lease != known.lease
    assert rig.publishers["n0"].state.state == "registered"
    assert rig.gone == []
    await directory.close()


async def test_d04_new_leader_has_the_data(rig: Rig) -> None:
    rig.node("n0", blocks=100)
    await rig.settled()
    leader = await leader_of(rig.etcd)
    leader.kill()
    try:
        fresh = Rig(rig.etcd, rig.cluster)
        assert fresh.view.state == "rebuilding"  # said honestly, until it ends
        fresh.start("reader", fresh.read())
        fresh.sources = rig.sources
        await fresh.settled()
        assert fresh.states[0] == "rebuilding"
        assert fresh.blocks_when_current == 100  # never "current" without the data
        await fresh.close()
    finally:
        leader.start()
    await rig.settled()


async def test_d16_rolling_restart_marks_no_node_dead(rig: Rig) -> None:
    sources = [rig.node(f"n{i}") for i in range(3)]
    await rig.settled()
    for member in rig.etcd.members:
        member.terminate()
        await asyncio.sleep(0.3)
        member.start()
        await rig.until(member.answers, "the member is back")
        for source in sources:
            source.store()
        await rig.settled()
    assert rig.gone == []
    assert set(rig.view.nodes) == {"n0", "n1", "n2"}


async def test_b12_store_that_forgot_everything_is_filled_again(cluster_name: str) -> None:
    """Metadata service restarted empty: another epoch, nodes register again by themselves."""
    if etcd_binary() is None:
        pytest.skip("etcd is not installed")
    with EtcdCluster(1) as etcd:
        rig = Rig(etcd, cluster_name)
        rig.start("reader", rig.read())
        sources = [rig.node(f"n{i}") for i in range(2)]
        await rig.settled()
        etcd.members[0].forget()
        for source in sources:
            source.store()
        await rig.settled()
        assert rig.gone == []
        await rig.close()


async def test_b13_a_node_joins_within_seconds_after_the_store_forgot(cluster_name: str) -> None:
    if etcd_binary() is None:
        pytest.skip("etcd is not installed")
    with EtcdCluster(1) as etcd:
        rig = Rig(etcd, cluster_name)
        rig.start("reader", rig.read())
        source = rig.node("n0")
        await rig.settled()
        etcd.members[0].forget()
        source.store()
        await rig.settled()
        rig.node("n9")
        assert await rig.until(rig.converged, "a new node joins", seconds=10.0) < 10.0
        assert rig.gone == []
        await rig.close()


async def test_b14_records_stay_constant_over_100_restarts(rig: Rig) -> None:
    directory = rig.directory()
    counts = []
    for incarnation in range(1, 101):
        registration = await directory.register(NodeRecord("n1", incarnation), 60.0)
        await registration.tell([
            Snapshot("n1", incarnation, 1, True, True, [run(0, 10)]),
            EventBatch("n1", incarnation, 2, [run(10, 11)]),
        ])  # fmt: skip
        found, _ = await directory._client.read_all(directory._root)
        counts.append(len(found))
    assert set(counts) == {3}
    assert await directory.nodes() == [NodeRecord("n1", 100)]
    await directory.close()


async def test_d15_quota_reached_is_told_and_serving_goes_on(cluster_name: str) -> None:
    if etcd_binary() is None:
        pytest.skip("etcd is not installed")
    quota = str(16 * 1024 * 1024)
    with EtcdCluster(1, "--quota-backend-bytes", quota) as etcd:
        rig = Rig(etcd, cluster_name)
        rig.start("reader", rig.read())
        rig.start("lookups", rig.look_up())
        source = rig.node("n0")
        await rig.settled()
        directory = rig.directory()
        leadership = await directory.campaign("filler", "f", 60.0)
        assert leadership is not None

        async def fill() -> None:
            for i in range(100):
                await leadership.write(f"fill{i}", bytes(1024 * 1024))

        with pytest.raises(DirectoryReadOnlyError, match="read-only"):
            await fill()
        with pytest.raises(DirectoryReadOnlyError):
            await directory.check_writable()
        source.store()
        publisher = rig.publishers["n0"]
        await rig.until(lambda: publisher.state.state == "read_only", "the publisher knows")
        _, before = await directory._client.get(b"x")
        await asyncio.sleep(1.5 * TTL)  # the lease is renewed all the while, and writes nothing
        _, after = await directory._client.get(b"x")
        assert after == before
        assert [record.node_id for record in await directory.nodes()] == ["n0"]
        assert publisher.state.registrations == 1
        assert rig.lookups > 0
        assert rig.gone == []
        await directory.close()
        await rig.close()


async def test_silent_compaction_lists_again_and_tells_the_difference(rig: Rig) -> None:
    """A watcher that was away longer than the history goes."""
    source = rig.node("n0")
    await rig.settled()
    await rig.end("reader")
    for _ in range(5):
        source.store()
        await asyncio.sleep(0.2)
    directory = rig.directory()
    _, revision = await directory._client.get(b"x")
    async with grpc.aio.insecure_channel(rig.etcd.endpoints[0]) as channel:
        compact = channel.unary_unary("/etcdserverpb.KV/Compact")
        await compact(b"\x08" + _varint(revision), timeout=5.0)
    watch = directory._client.watch(directory._root, 1)
    with pytest.raises(CompactedError):
        async for _ in watch:
            pass
    rig.start("reader", rig.read())
    await rig.settled()
    await directory.close()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
