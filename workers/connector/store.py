"""Writes blocks to the pool: copied while the device still holds them, published in background.

The copy runs on the worker's main thread, before the engine can reuse a block. Checksums and the
publication run on one thread behind a bounded queue; a full queue makes the step wait, and where
even that does not help the step publishes by itself. Nothing is dropped silently.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from workers.connector.affinity import leave_engine_cores
from workers.core.messages import CompleteStore, SlotRef, StoredSlot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """Slots whose bytes are in place; `seal` computes a slot's checksum (and marks the slot)."""

    owner: str
    slots: tuple[SlotRef, ...]
    seal: Callable[[SlotRef], int | None]  # None: the slot is no longer ours


@dataclass(slots=True)
class PublishCounts:
    """Blocks, cumulative."""

    published: int = 0
    failed: int = 0
    published_inline: int = 0


class Publisher:
    """One thread that publishes. `close` publishes what is queued and ends it, bounded."""

    def __init__(
        self,
        complete: Callable[[CompleteStore], bool],
        *,
        bound_blocks: int,
        wait_seconds: float,
    ) -> None:
        """`complete` tells the agent, and says whether it took it."""
        self._complete = complete
        self._bound = bound_blocks
        self._wait_seconds = wait_seconds
        self._queue: deque[Written] = deque()
        self._queued_blocks = 0
        self._changed = threading.Condition()
        self._closing = False
        self.counts = PublishCounts()
        self._thread = threading.Thread(target=self._run, name="perilune-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def put(self, written: Written) -> None:
        """Queue for publication; waits while the queue is full, then publishes here instead."""
        with self._changed:
            has_room = self._changed.wait_for(self._has_room, self._wait_seconds)
            if has_room and not self._closing:
                self._queue.append(written)
                self._queued_blocks += len(written.slots)
                self._changed.notify_all()
                return
            self.counts.published_inline += len(written.slots)
        self._publish(written)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is queued or being published."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued_blocks, timeout)

    def _has_room(self) -> bool:
        return self._closing or self._queued_blocks < self._bound

    def _run(self) -> None:
        leave_engine_cores()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                written = self._queue.popleft()
            try:
                self._publish(written)
            except Exception:
                # The thread must outlive one bad batch; the agent's lease ends its slots.
                logger.exception("publishing %d blocks failed", len(written.slots))
                self.counts.failed += len(written.slots)
            with self._changed:
                self._queued_blocks -= len(written.slots)
                self._changed.notify_all()

    def _publish(self, written: Written) -> None:
        stored: list[StoredSlot] = []
        failed: list[SlotRef] = []
        for ref in written.slots:
            checksum = written.seal(ref)
            if checksum is None:
                failed.append(ref)
            else:
                stored.append(StoredSlot(ref.slot, ref.generation, checksum))
        if self._complete(CompleteStore(written.owner, stored, failed)):
            self.counts.published += len(stored)
            self.counts.failed += len(failed)
        else:
            self.counts.failed += len(written.slots)
