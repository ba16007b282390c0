"""Keeps one node's place in the directory: its record, and its block lists in batches.

Off every request's path: whatever the store does, the node serves on. A lost lease means a new one
and a new registration; a store that takes no writes is asked again now and then, while the lease
goes on being renewed (which writes no history).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from workers.core.messages import BlocksRemoved, BlocksStored, EventBatch, KvEvent, Snapshot
from workers.directory.base import (
    Directory,
    DirectoryError,
    DirectoryReadOnlyError,
    LeaseLostError,
    NodeRecord,
    OutdatedError,
    Registration,
)

MAX_PART_BLOCKS: Final = 16_384
MAX_DELTAS: Final = 200
"""Batches after a snapshot, before the next snapshot takes their place."""
MIN_SNAPSHOT_SECONDS: Final = 10.0
MIN_BACKOFF_SECONDS: Final = 0.2
MAX_BACKOFF_SECONDS: Final = 5.0
READ_ONLY_SECONDS: Final = 10.0
WITHDRAW_SECONDS: Final = 1.0
OUTDATED_SECONDS: Final = 30.0
"""While a younger life of the node is registered; an older agent still runs then."""

_log = logging.getLogger(__name__)


class BlockSource(Protocol):
    """What a node tells; `workers.agent.events.EventLog` is one."""

    incarnation: int
    sequence: int

    def since(self, incarnation: int, sequence: int) -> list[EventBatch] | None:
        """What came after; None where that is no longer known."""
        ...

    def snapshot(self, runs: list[BlocksStored]) -> Iterator[Snapshot]: ...


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """`list_seconds`: how often new events are written, at most; what readers may lag behind."""

    ttl_seconds: float = 10.0
    list_seconds: float = 1.0
    tick_seconds: float = 0.25
    read_only_seconds: float = READ_ONLY_SECONDS
    min_snapshot_seconds: float = MIN_SNAPSHOT_SECONDS


@dataclass(slots=True)
class PublisherState:
    """For metrics and tests. `state`: starting, registered, read_only, unreachable, outdated."""

    state: str = "starting"
    reason: str = ""
    registrations: int = 0
    leases_lost: int = 0
    parts_told: int = 0


class DirectoryPublisher:
    """`run` it as one task; cancelling it withdraws the node."""

    def __init__(
        self,
        directory: Directory,
        record: NodeRecord,
        source: BlockSource,
        runs: Callable[[], list[BlocksStored]],
        settings: PublisherSettings | None = None,
    ) -> None:
        self._directory = directory
        self._record = record
        self._source = source
        self._runs = runs
        self._settings = settings or PublisherSettings()
        self.state = PublisherState()

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        try:
            while True:
                try:
                    registration = await self._directory.register(
                        self._record, self._settings.ttl_seconds
                    )
                    failures = 0
                    await self._keep(registration)
                except OutdatedError as error:
                    self._note("outdated", str(error))
                    await asyncio.sleep(OUTDATED_SECONDS)
                except LeaseLostError as error:
                    self.state.leases_lost += 1
                    self._note("unreachable", str(error))
                except DirectoryError as error:
                    read_only = isinstance(error, DirectoryReadOnlyError)
                    self._note("read_only" if read_only else "unreachable", str(error))
                await asyncio.sleep(min(MIN_BACKOFF_SECONDS * 2.0**failures, MAX_BACKOFF_SECONDS))
                failures = min(failures + 1, 10)
        finally:
            await self._directory.close()

    async def _keep(self, registration: Registration) -> None:
        self.state.registrations += 1
        self._note("registered", "")
        lists = _Lists(registration, self._source, self._runs, self._settings)
        loop = asyncio.get_running_loop()
        renew_at = list_at = loop.time()
        try:
            while True:
                if loop.time() >= renew_at:
                    await self._renew(registration)
                    renew_at = loop.time() + self._settings.ttl_seconds / 3
                if loop.time() >= list_at:
                    list_at = loop.time() + await self._tell(lists)
                await asyncio.sleep(self._settings.tick_seconds)
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WITHDRAW_SECONDS):
                    await registration.withdraw()
            raise

    async def _renew(self, registration: Registration) -> None:
        """A failed renewal is tried again while our own deadline has not passed."""
        try:
            await registration.renew()
        except LeaseLostError:
            raise
        except DirectoryError as error:
            if registration.remaining_seconds <= 0:
                raise LeaseLostError(f"not renewed in time: {error}") from None
            self._note("unreachable", str(error))
            return
        if self.state.state == "unreachable":
            self._note("registered", "")

    async def _tell(self, lists: _Lists) -> float:
        """Write what is new; seconds until the next time."""
        try:
            self.state.parts_told += await lists.tell()
        except DirectoryReadOnlyError as error:
            self._note("read_only", str(error))
            return self._settings.read_only_seconds
        except (LeaseLostError, OutdatedError):
            raise
        except DirectoryError as error:
            self._note("unreachable", str(error))
            return self._settings.list_seconds
        if self.state.state == "read_only":
            self._note("registered", "")
        return self._settings.list_seconds

    def _note(self, state: str, reason: str) -> None:
        if state != self.state.state:
            level = logging.INFO if state == "registered" else logging.WARNING
            _log.log(
                level, "directory state=%s node=%s reason=%s", state, self._record.node_id, reason
            )
        self.state.state, self.state.reason = state, reason


class _Lists:
    """How far a registration's lists are."""

    def __init__(
        self,
        registration: Registration,
        source: BlockSource,
        runs: Callable[[], list[BlocksStored]],
        settings: PublisherSettings,
    ) -> None:
        self._registration = registration
        self._source = source
        self._runs = runs
        self._settings = settings
        self._told: int | None = None  # None: begin with a snapshot
        self._deltas = 0
        self._delta_blocks = 0
        self._snapshot_blocks = 0
        self._snapshot_at = float("-inf")

    async def tell(self) -> int:
        """Bring the lists up to date; parts written. After an error it begins with a snapshot."""
        source = self._source
        if self._told == source.sequence:
            return 0
        batches = None
        if self._told is not None and not self._is_long():
            batches = source.since(source.incarnation, self._told)
        if batches is None and asyncio.get_running_loop().time() < (
            self._snapshot_at + self._settings.min_snapshot_seconds
        ):
            return 0  # lists that lag are fine; a store full of snapshots is not
        parts: list[Snapshot | EventBatch]
        if batches is None:
            parts, self._snapshot_at = self._snapshot(), asyncio.get_running_loop().time()
        else:
            parts = list(_joined(batches))
        reached = parts[-1].sequence
        self._told = None
        await self._registration.tell(parts)
        self._told = reached
        self._deltas += len(parts) if batches is not None else 0
        return len(parts)

    def _is_long(self) -> bool:
        return self._deltas >= MAX_DELTAS or (
            self._delta_blocks > max(MAX_PART_BLOCKS, self._snapshot_blocks)
        )

    def _snapshot(self) -> list[Snapshot | EventBatch]:
        runs = self._runs()
        self._deltas = self._delta_blocks = 0
        self._snapshot_blocks = sum(len(run.block_hashes) for run in runs)
        return list(self._source.snapshot(runs))


def _joined(batches: list[EventBatch]) -> Iterator[EventBatch]:
    """The same events in fewer batches of bounded size."""
    events: list[KvEvent] = []
    size = 0
    for batch in batches:
        blocks = sum(_num_blocks(event) for event in batch.events)
        if events and size + blocks > MAX_PART_BLOCKS:
            first = batch.sequence - len(batch.events)
            yield EventBatch(batch.node_id, batch.incarnation, first, events)
            events, size = [], 0
        events = events + batch.events
        size += blocks
    last = batches[-1]
    yield EventBatch(last.node_id, last.incarnation, last.sequence, events)


def _num_blocks(event: KvEvent) -> int:
    return len(event.block_hashes) if isinstance(event, BlocksStored | BlocksRemoved) else 1
