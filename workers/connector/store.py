"""Writes blocks to the pool: copied while the device still holds them, published in background.

The copy runs on the worker's main thread, before the engine can reuse a block. Checksums and the
publication run on one thread behind a bounded queue, and so does what the pool refused at first.
No engine step waits for that thread: what finds the queue full is given up and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.connector.affinity import leave_engine_cores
from workers.core.messages import CompleteStore, SlotRef, StoredSlot

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 0.01
_LAST_RETRY_SECONDS = 0.5


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
    refused: int = 0  # the queue was full


class Publisher:
    """One thread that publishes. `close` publishes what is queued and ends it, bounded."""

    def __init__(
        self,
        complete: Callable[[CompleteStore], bool],
        *,
        bound_blocks: int,
        retry: Callable[[], bool | None] = lambda: None,
    ) -> None:
        """`complete` tells the agent, and says whether it took it.

        `retry` runs in the thread now and then after `start_retrying`: it says whether it got
        anything done, and None where nothing is left to do.
        """
        self._complete = complete
        self._bound = bound_blocks
        self._retry = retry
        self._retry_at: float | None = None
        self._pause = _FIRST_RETRY_SECONDS
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

    def put(self, written: Written) -> bool:
        """Queue for publication; False where the queue is full."""
        with self._changed:
            if self._closing or self._queued_blocks >= self._bound:
                self.counts.refused += len(written.slots)
                return False
            self._queue.append(written)
            self._queued_blocks += len(written.slots)
            self._changed.notify_all()
            return True

    def start_retrying(self) -> None:
        with self._changed:
            if self._retry_at is None:
                self._pause = _FIRST_RETRY_SECONDS
                self._retry_at = time.monotonic() + self._pause
                self._changed.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is queued or being published."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued_blocks, timeout)

    def owners(self) -> set[str]:
        """Whose blocks are queued: their leases must last until these are published."""
        with self._changed:
            return {written.owner for written in self._queue}

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        leave_engine_cores()
        while True:
            written, retries = self._next()
            if written is None and not retries:
                return
            try:
                if written is not None:
                    self.publish(written)
                if retries:
                    self._try_again()
            except Exception:
                # The thread must outlive one bad batch; the agent's lease ends its slots.
                logger.exception("publishing failed")
                self.counts.failed += len(written.slots) if written is not None else 0
            if written is not None:
                with self._changed:
                    self._queued_blocks -= len(written.slots)
                    self._changed.notify_all()

    def _next(self) -> tuple[Written | None, bool]:
        """What to publish and whether to retry; neither at the end."""
        with self._changed:
            while not self._queue and not self._closing:
                pause = None
                if self._retry_at is not None:
                    pause = self._retry_at - time.monotonic()
                    if pause <= 0:
                        break
                self._changed.wait(pause)
            written = self._queue.popleft() if self._queue else None
            due = self._retry_at is not None and time.monotonic() >= self._retry_at
            return written, due and not self._closing

    def _try_again(self) -> None:
        self._retry_at = time.monotonic() + _LAST_RETRY_SECONDS  # should it raise
        done = self._retry()
        with self._changed:
            if done is None:
                self._retry_at = None
                return
            self._pause = (
                _FIRST_RETRY_SECONDS if done else min(2 * self._pause, _LAST_RETRY_SECONDS)
            )
            self._retry_at = time.monotonic() + (0.0 if done else self._pause)

    def publish(self, written: Written, unused: Sequence[SlotRef] = ()) -> None:
        """Seal and tell the agent; from this thread only. `unused` slots are given back."""
        stored: list[StoredSlot] = []
        failed: list[SlotRef] = list(unused)
        for ref in written.slots:
            checksum = written.seal(ref)
            if checksum is None:
                failed.append(ref)
            else:
                stored.append(StoredSlot(ref.slot, ref.generation, checksum))
        if self._complete(CompleteStore(written.owner, stored, failed)):
            self.counts.published += len(stored)
            self.counts.failed += len(failed) - len(unused)
        else:
            self.counts.failed += len(written.slots)
