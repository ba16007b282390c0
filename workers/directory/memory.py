"""The directory inside one process: for one host, and the twin that the conformance suite compares.

Several `MemoryDirectory`s share one `MemoryStore`. Leases end by the clock, looked at whenever
something is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from workers.core.clock import Clock
from workers.core.messages import Snapshot
from workers.directory.base import (
    Change,
    LeaseLostError,
    ListPart,
    ListTold,
    NodeGone,
    NodeRecord,
    NodeUp,
    OutdatedError,
    Watching,
)

MAX_WAITING_CHANGES: Final = 100_000
"""Of one watcher; a slower one is told everything anew."""
EXPIRY_LOOK_SECONDS: Final = 0.05


@dataclass(slots=True, eq=False)
class _Lease:
    expires_at: float
    ttl_seconds: float


@dataclass(slots=True)
class _Place:
    record: NodeRecord
    lease: _Lease
    parts: list[ListPart] = field(default_factory=list)


@dataclass(slots=True)
class _Leader:
    holder: str
    lease: _Lease
    fence: int


class MemoryStore:
    """What is registered. All methods are of one event loop's thread."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.places: dict[str, _Place] = {}
        self.leaders: dict[str, _Leader] = {}
        self.values: dict[str, bytes] = {}
        self.fences = 0
        self._watchers: list[asyncio.Queue[Change]] = []

    def expire(self) -> None:
        """Forget what hangs on leases that are over."""
        now = self.clock.monotonic()
        for node_id in [k for k, place in self.places.items() if place.lease.expires_at <= now]:
            del self.places[node_id]
            self.tell(NodeGone(node_id))
        for name in [k for k, leader in self.leaders.items() if leader.lease.expires_at <= now]:
            del self.leaders[name]

    def grant(self, ttl_seconds: float) -> _Lease:
        return _Lease(self.clock.monotonic() + ttl_seconds, ttl_seconds)

    def renew(self, lease: _Lease) -> None:
        now = self.clock.monotonic()
        if lease.expires_at <= now:
            raise LeaseLostError("the lease is over")
        lease.expires_at = now + lease.ttl_seconds

    def tell(self, change: Change) -> None:
        for queue in self._watchers:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                for told in self.everything():
                    queue.put_nowait(told)
            queue.put_nowait(change)

    def everything(self) -> list[Change]:
        told: list[Change] = []
        for place in self.places.values():
            told.append(NodeUp(place.record))
            told += map(ListTold, place.parts)
        return told

    def watch(self) -> asyncio.Queue[Change]:
        queue: asyncio.Queue[Change] = asyncio.Queue(MAX_WAITING_CHANGES)
        for change in (*self.everything(), Watching("current")):
            queue.put_nowait(change)
        self._watchers.append(queue)
        return queue

    def unwatch(self, queue: asyncio.Queue[Change]) -> None:
        self._watchers.remove(queue)


class MemoryDirectory:
    """See `Directory`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def register(self, record: NodeRecord, ttl_seconds: float) -> MemoryRegistration:
        store = self._store
        store.expire()
        known = store.places.get(record.node_id)
        if known is not None and known.record.incarnation > record.incarnation:
            raise OutdatedError(
                f"node {record.node_id} is registered as incarnation {known.record.incarnation}, "
                f"{record.incarnation} is an older life of it"
            )
        place = store.places[record.node_id] = _Place(record, store.grant(ttl_seconds))
        store.tell(NodeUp(record))
        return MemoryRegistration(store, place)

    async def nodes(self) -> list[NodeRecord]:
        self._store.expire()
        return [place.record for _, place in sorted(self._store.places.items())]

    async def lists(self, node_id: str) -> list[ListPart]:
        self._store.expire()
        place = self._store.places.get(node_id)
        return [] if place is None else list(place.parts)

    async def changes(self) -> AsyncIterator[Change]:
        queue = self._store.watch()
        try:
            while True:
                self._store.expire()
                try:
                    async with asyncio.timeout(EXPIRY_LOOK_SECONDS):
                        change = await queue.get()
                except TimeoutError:
                    continue
                yield change
        finally:
            self._store.unwatch(queue)

    async def campaign(self, name: str, holder: str, ttl_seconds: float) -> MemoryLeadership | None:
        store = self._store
        store.expire()
        if name in store.leaders:
            return None
        store.fences += 1
        leader = store.leaders[name] = _Leader(holder, store.grant(ttl_seconds), store.fences)
        return MemoryLeadership(store, name, leader)

    async def leader(self, name: str) -> str | None:
        self._store.expire()
        leader = self._store.leaders.get(name)
        return None if leader is None else leader.holder

    async def read(self, key: str) -> bytes | None:
        return self._store.values.get(key)

    async def check_writable(self) -> None:
        pass

    async def close(self) -> None:
        pass


class MemoryRegistration:
    """See `Registration`."""

    def __init__(self, store: MemoryStore, place: _Place) -> None:
        self._store = store
        self._place = place

    @property
    def remaining_seconds(self) -> float:
        return self._place.lease.expires_at - self._store.clock.monotonic()

    async def renew(self) -> None:
        self._store.renew(self._place.lease)

    async def tell(self, parts: Sequence[ListPart]) -> None:
        self._store.expire()
        current = self._store.places.get(self._place.record.node_id)
        if current is None:
            raise LeaseLostError("the lease is over")
        if current is not self._place:
            raise OutdatedError(f"node {current.record.node_id} was registered again")
        for part in parts:
            if isinstance(part, Snapshot) and part.first:
                self._place.parts.clear()
            self._place.parts.append(part)
            self._store.tell(ListTold(part))

    async def withdraw(self) -> None:
        node_id = self._place.record.node_id
        if self._store.places.get(node_id) is self._place:
            del self._store.places[node_id]
            self._store.tell(NodeGone(node_id))


class MemoryLeadership:
    """See `Leadership`."""

    def __init__(self, store: MemoryStore, name: str, leader: _Leader) -> None:
        self._store = store
        self._name = name
        self._leader = leader

    @property
    def fence(self) -> int:
        return self._leader.fence

    @property
    def remaining_seconds(self) -> float:
        return self._leader.lease.expires_at - self._store.clock.monotonic()

    async def renew(self) -> None:
        self._store.renew(self._leader.lease)

    async def write(self, key: str, value: bytes) -> None:
        self._store.expire()
        if self._store.leaders.get(self._name) is not self._leader:
            raise OutdatedError(f"{self._leader.holder} does not lead {self._name} any more")
        self._store.values[key] = value

    async def resign(self) -> None:
        if self._store.leaders.get(self._name) is self._leader:
            del self._store.leaders[self._name]
