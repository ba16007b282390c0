"""The directory in etcd.

Keys, under /perilune/<cluster>/:
  nodes/<node>                a `NodeRecord`, on the node's lease
  lists/<node>/<number>       parts of its block lists in order, on the same lease
  leaders/<name>              who leads, on its lease; the fence is the key's create_revision
  values/<key>                what a leader wrote
Values are msgpack. Every change of a node's keys is guarded by the node record's revision, so that
an older life, or a writer that was away, cannot disturb a younger one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec

from workers.core.clock import Clock
from workers.core.messages import Snapshot
from workers.directory.base import (
    Change,
    CompactedError,
    DirectoryError,
    DirectoryUnavailableError,
    LeaseLostError,
    ListPart,
    ListTold,
    NodeGone,
    NodeRecord,
    NodeUp,
    OutdatedError,
    Watching,
)
from workers.directory.etcd_client import (
    EtcdClient,
    KeyEvent,
    KeyValue,
    Progress,
    delete_prefix,
    delete_range,
    put,
)
from workers.directory.etcd_messages import EQUAL, MESSAGES, TARGET_CREATE, TARGET_MOD

MAX_TXN_BYTES: Final = 1024 * 1024
"""etcd refuses requests above 1.5 MiB by default."""
MAX_TXN_PARTS: Final = 100
REGISTER_TRIES: Final = 5
WATCH_AGAIN_SECONDS: Final = 0.2
_encode: Final = msgspec.msgpack.Encoder().encode
_records: Final = msgspec.msgpack.Decoder(NodeRecord)
_parts: Final = msgspec.msgpack.Decoder(ListPart)


class EtcdDirectory:
    """See `Directory`. Owns the client."""

    def __init__(self, client: EtcdClient, cluster: str, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._root = f"/perilune/{cluster}/".encode()

    async def register(self, record: NodeRecord, ttl_seconds: float) -> EtcdRegistration:
        key = self._root + b"nodes/" + record.node_id.encode()
        lists = self._lists(record.node_id)
        for _ in range(REGISTER_TRIES):
            known, _ = await self._client.get(key)
            if known is not None:
                _refuse_older(record, _records.decode(known.value))
            lease = await _Lease.grant(self._client, self._clock, ttl_seconds)
            done = await self._client.txn(
                [_unchanged(key, known.mod_revision if known else 0)],
                [delete_prefix(lists), put(key, _encode(record), lease.id)],
            )
            if done.succeeded:
                if known is not None and known.lease:
                    with contextlib.suppress(DirectoryError):  # else it ends by itself
                        await self._client.revoke(known.lease)
                return EtcdRegistration(self._client, lease, record, key, lists, done.revision)
            await lease.end()
        raise DirectoryUnavailableError(f"{record.node_id}: others register it all the time")

    async def nodes(self) -> list[NodeRecord]:
        found, _ = await self._client.read_all(self._root + b"nodes/")
        return [_records.decode(each.value) for each in found]

    async def lists(self, node_id: str) -> list[ListPart]:
        found, _ = await self._client.read_all(self._lists(node_id))
        return [_parts.decode(each.value) for each in found]

    async def changes(self) -> AsyncIterator[Change]:
        told = _Told(self._root)
        lost = False
        while True:
            try:
                async with contextlib.aclosing(self._follow(told)) as stream:  # type: ignore[type-var]  # it is an async generator
                    async for changes in stream:
                        for change in changes:
                            yield change
                        if lost or told.is_fresh:
                            yield Watching("current")
                            lost = told.is_fresh = False
            except DirectoryError as error:
                if not lost:
                    yield Watching("lost", str(error))
                lost = True
                await asyncio.sleep(WATCH_AGAIN_SECONDS)

    async def campaign(self, name: str, holder: str, ttl_seconds: float) -> EtcdLeadership | None:
        key = self._root + b"leaders/" + name.encode()
        known, _ = await self._client.get(key)
        if known is not None:
            return None
        lease = await _Lease.grant(self._client, self._clock, ttl_seconds)
        done = await self._client.txn([_created(key, 0)], [put(key, holder.encode(), lease.id)])
        if not done.succeeded:
            await lease.end()
            return None
        return EtcdLeadership(self._client, lease, key, done.revision, self._root + b"values/")

    async def leader(self, name: str) -> str | None:
        known, _ = await self._client.get(self._root + b"leaders/" + name.encode())
        return None if known is None else known.value.decode()

    async def read(self, key: str) -> bytes | None:
        known, _ = await self._client.get(self._root + b"values/" + key.encode())
        return None if known is None else known.value

    async def check_writable(self) -> None:
        # A store out of space refuses what might put, before it looks at the condition.
        key = self._root + b"probe"
        await self._client.txn([_created(key, -1)], [put(key, b"")], repeat=True)

    async def close(self) -> None:
        await self._client.close()

    # --- inside -----------------------------------------------------------------------------

    def _lists(self, node_id: str) -> bytes:
        return self._root + b"lists/" + node_id.encode() + b"/"

    async def _follow(self, told: _Told) -> AsyncIterator[list[Change]]:
        """Changes from where `told` is, until the store fails; an empty list says "alive"."""
        while True:
            if not told.revision:
                found, revision = await self._client.read_all(self._root)
                yield told.listing(found, revision)
            try:
                watch = self._client.watch(self._root, told.revision + 1)
                async with contextlib.aclosing(watch) as stream:  # type: ignore[type-var]  # it is an async generator
                    async for message in stream:
                        if isinstance(message, Progress) and await self._is_reset(told, message):
                            told.reset()
                            break
                        # A progress reply may run ahead of events (etcd before 3.4.25), so only
                        # events say where to resume.
                        yield told.events(message) if isinstance(message, list) else []
            except CompactedError:
                told.revision = 0

    async def _is_reset(self, told: _Told, progress: Progress) -> bool:
        """Whether the store began anew: it is behind what we saw, and not just this member."""
        if progress.revision >= told.revision:
            return False
        _, revision = await self._client.get(self._root)
        return revision < told.revision


class _Told:
    """How far a watcher has been told: each key's revision, so that a listing yields differences."""

    def __init__(self, root: bytes) -> None:
        self._nodes = root + b"nodes/"
        self._lists = root + b"lists/"
        self._known: dict[bytes, int] = {}
        self.revision = 0  # 0: list first
        self.is_fresh = False  # a listing has been told since this was reset

    def reset(self) -> None:
        """The store counts revisions from the start again: none that is known means anything."""
        self._known = dict.fromkeys(self._known, -1)
        self.revision = 0

    def listing(self, found: list[KeyValue], revision: int) -> list[Change]:
        now = {each.key for each in found}
        events = [KeyEvent(key, None, revision) for key in self._known if key not in now]
        fresh = [each for each in found if self._known.get(each.key) != each.mod_revision]
        # records before lists, and these in their order: as they were written
        fresh.sort(key=lambda each: (not each.key.startswith(self._nodes), each.key))
        events += [KeyEvent(each.key, each.value, each.mod_revision) for each in fresh]
        changes = self.events(events)
        self.revision, self.is_fresh = revision, True
        return changes

    def events(self, events: list[KeyEvent]) -> list[Change]:
        changes: list[Change] = []
        for event in events:
            is_record = event.key.startswith(self._nodes)
            if event.value is None:
                self._known.pop(event.key, None)
                if is_record:
                    changes.append(NodeGone(event.key[len(self._nodes) :].decode()))
                continue
            self._known[event.key] = event.revision
            if is_record:
                changes.append(NodeUp(_records.decode(event.value)))
            elif event.key.startswith(self._lists):
                changes.append(ListTold(_parts.decode(event.value)))
        if events:
            self.revision = events[-1].revision
        return changes


class _Lease:
    """A lease of this process, with a deadline of our own: the server's is a lower bound only."""

    def __init__(self, client: EtcdClient, clock: Clock, lease_id: int) -> None:
        self._client = client
        self._clock = clock
        self.id = lease_id
        self._ends = 0.0

    @classmethod
    async def grant(cls, client: EtcdClient, clock: Clock, ttl_seconds: float) -> _Lease:
        lease = cls(client, clock, secrets.randbits(62) + 1)
        asked = clock.monotonic()
        lease._ends = asked + await client.grant(lease.id, ttl_seconds)
        return lease

    @property
    def remaining_seconds(self) -> float:
        return self._ends - self._clock.monotonic()

    async def renew(self) -> None:
        asked = self._clock.monotonic()
        self._ends = asked + await self._client.keep_alive(self.id)

    async def end(self) -> None:
        with contextlib.suppress(DirectoryError):
            await self._client.revoke(self.id)


class EtcdRegistration:
    """See `Registration`."""

    def __init__(
        self, client: EtcdClient, lease: _Lease, record: NodeRecord, key: bytes, lists: bytes,
        revision: int,
    ) -> None:  # fmt: skip
        self._client = client
        self._lease = lease
        self._record = record
        self._key = key
        self._lists = lists
        self._revision = revision  # of the node's record
        self._number = 0

    @property
    def remaining_seconds(self) -> float:
        return self._lease.remaining_seconds

    async def renew(self) -> None:
        await self._lease.renew()

    async def tell(self, parts: Sequence[ListPart]) -> None:
        operations: list[Any] = []
        size = 0
        for part in parts:
            value = _encode(part)
            replaces = isinstance(part, Snapshot) and part.first
            full = size + len(value) > MAX_TXN_BYTES or len(operations) >= MAX_TXN_PARTS
            if operations and (full or replaces):
                await self._write(operations)
                operations, size = [], 0
            self._number += 1
            key = self._lists + b"%016d" % self._number
            if replaces:  # with the first part in one step: a store that is full keeps the old ones
                operations.append(delete_range(self._lists, key))
            operations.append(put(key, value, self._lease.id))
            size += len(value)
        if operations:
            await self._write(operations)

    async def withdraw(self) -> None:
        await self._lease.end()

    async def _write(self, operations: list[Any]) -> None:
        done = await self._client.txn(
            [_unchanged(self._key, self._revision)], operations, repeat=True
        )
        if not done.succeeded:
            known, _ = await self._client.get(self._key)
            if known is None:
                raise LeaseLostError(f"{self._record.node_id} is not registered any more")
            raise OutdatedError(f"{self._record.node_id} was registered again by another process")


class EtcdLeadership:
    """See `Leadership`."""

    def __init__(
        self, client: EtcdClient, lease: _Lease, key: bytes, fence: int, values: bytes
    ) -> None:
        self._client = client
        self._lease = lease
        self._key = key
        self._fence = fence
        self._values = values

    @property
    def fence(self) -> int:
        return self._fence

    @property
    def remaining_seconds(self) -> float:
        return self._lease.remaining_seconds

    async def renew(self) -> None:
        await self._lease.renew()

    async def write(self, key: str, value: bytes) -> None:
        done = await self._client.txn(
            [_created(self._key, self._fence)], [put(self._values + key.encode(), value)],
            repeat=True,
        )  # fmt: skip
        if not done.succeeded:
            raise OutdatedError(f"fence {self._fence} does not lead any more")

    async def resign(self) -> None:
        await self._lease.end()


def _refuse_older(record: NodeRecord, known: NodeRecord) -> None:
    if known.incarnation > record.incarnation:
        raise OutdatedError(
            f"node {record.node_id} is registered as incarnation {known.incarnation}, "
            f"{record.incarnation} is an older life of it"
        )


def _unchanged(key: bytes, mod_revision: int) -> Any:
    """Condition; revision 0: there is no such key."""
    return MESSAGES["Compare"](result=EQUAL, target=TARGET_MOD, key=key, mod_revision=mod_revision)


def _created(key: bytes, create_revision: int) -> Any:
    return MESSAGES["Compare"](
        result=EQUAL, target=TARGET_CREATE, key=key, create_revision=create_revision
    )
