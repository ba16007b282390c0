"""KV events on their way to subscribers: numbered, kept for a while, bounded for each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from workers.core.framing import encode_reply
from workers.core.gateway_messages import GatewayShare
from workers.core.messages import (
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    KvEvent,
    LegReport,
    Snapshot,
)

RING_BATCHES: Final = 4096
RING_BLOCKS: Final = 262_144
QUEUE_BLOCKS: Final = 65_536
QUEUE_MESSAGES: Final = 4096
QUEUE_REPORTS: Final = 1000
SNAPSHOT_PART_BLOCKS: Final = 16_384

Runs = Callable[[], list[BlocksStored]]


class EventLog:
    """Numbers events and keeps the last ones, so that a subscriber who was away can go on."""

    def __init__(self, node_id: str, incarnation: int) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.sequence = 0
        self._ring: deque[EventBatch] = deque()
        self._ring_blocks = 0

    def append(self, events: list[KvEvent]) -> EventBatch:
        self.sequence += len(events)
        batch = EventBatch(self.node_id, self.incarnation, self.sequence, events)
        self._ring.append(batch)
        self._ring_blocks += count_blocks(batch)
        while len(self._ring) > RING_BATCHES or self._ring_blocks > RING_BLOCKS:
            self._ring_blocks -= count_blocks(self._ring.popleft())
        return batch

    def since(self, incarnation: int, sequence: int) -> list[EventBatch] | None:
        """What came after; None where that is no longer known, or never was."""
        if incarnation != self.incarnation or not 0 <= sequence <= self.sequence:
            return None
        if sequence == self.sequence:
            return []
        missed = [batch for batch in self._ring if batch.sequence > sequence]
        first = missed[0].sequence - len(missed[0].events) + 1 if missed else sequence + 2
        return missed if first <= sequence + 1 else None

    def snapshot(self, runs: list[BlocksStored]) -> Iterator[Snapshot]:
        """All of `runs` as of now, in parts of bounded size."""
        sequence = self.sequence  # later events come after the last part
        parts = list(_parts(runs)) or [[]]
        for i, part in enumerate(parts):
            first, last = i == 0, i == len(parts) - 1
            yield Snapshot(self.node_id, self.incarnation, sequence, first, last, part)


class Subscriber:
    """One subscribed connection. Never blocks the agent: a slow reader gets a snapshot instead.

    `write` takes a whole frame; the connection calls `pause` and `resume` as its socket fills
    and drains.
    """

    def __init__(self, log: EventLog, runs: Runs, write: Callable[[bytes], None]) -> None:
        self._log = log
        self._runs = runs
        self._write = write
        self._paused = False
        self._needs_snapshot = False
        self._parts: Iterator[Snapshot] | None = None
        self._batches: deque[EventBatch] = deque()
        self._batch_blocks = 0
        self._reports: deque[LegReport] = deque(maxlen=QUEUE_REPORTS)
        self._shares: dict[str, GatewayShare] = {}  # by gateway: the last one says it all
        self.num_resyncs = 0

    def start(self, incarnation: int, sequence: int) -> None:
        """Go on after this position, or begin with a snapshot."""
        self._clear()
        missed = self._log.since(incarnation, sequence)
        self._needs_snapshot = missed is None
        for batch in missed or ():
            self._enqueue(batch)
        self._flush()

    def offer(self, message: EventBatch | LegReport | GatewayShare) -> None:
        if isinstance(message, LegReport):
            self._reports.append(message)
        elif isinstance(message, GatewayShare):
            before = self._shares.get(message.gateway)
            self._shares[message.gateway] = message if before is None else message.after(before)
        elif not self._needs_snapshot:
            self._enqueue(message)
        self._flush()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._flush()

    def _enqueue(self, batch: EventBatch) -> None:
        self._batches.append(batch)
        self._batch_blocks += count_blocks(batch)
        if self._batch_blocks > QUEUE_BLOCKS or len(self._batches) > QUEUE_MESSAGES:
            self._clear()
            self._needs_snapshot = True
            self.num_resyncs += 1

    def _clear(self) -> None:
        self._batches.clear()
        self._batch_blocks = 0
        self._parts = None

    def _flush(self) -> None:
        while not self._paused:
            message = self._next()
            if message is None:
                return
            self._write(encode_reply(0, message))

    def _next(self) -> Snapshot | EventBatch | LegReport | GatewayShare | None:
        if self._needs_snapshot:
            self._clear()
            self._needs_snapshot = False
            self._parts = self._log.snapshot(self._runs())
        if self._parts is not None:
            part = next(self._parts, None)
            if part is not None:
                return part
            self._parts = None
        if self._batches:
            batch = self._batches.popleft()
            self._batch_blocks -= count_blocks(batch)
            return batch
        if self._shares:
            return self._shares.pop(next(iter(self._shares)))
        return self._reports.popleft() if self._reports else None


def count_blocks(batch: EventBatch) -> int:
    """Blocks that a batch names, at least 1."""
    named = (e for e in batch.events if isinstance(e, BlocksStored | BlocksMoved | BlocksRemoved))
    return max(1, sum(len(event.block_hashes) for event in named))


def _parts(runs: list[BlocksStored]) -> Iterator[list[BlocksStored]]:
    part: list[BlocksStored] = []
    room = SNAPSHOT_PART_BLOCKS
    for run in runs:
        parent, keys = run.parent, run.block_hashes
        while keys:
            taken = keys[:room]
            part.append(BlocksStored(run.namespace, parent, taken, run.tier))
            room -= len(taken)
            parent, keys = taken[-1], keys[len(taken) :]
            if not room:
                yield part
                part, room = [], SNAPSHOT_PART_BLOCKS
    if part:
        yield part
