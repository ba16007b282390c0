"""A few threads that copy for the endpoints of one transport whose bytes the host itself moves.

    endpoint.post ─▶ queue ─▶ copier: endpoint.move(ops) ─▶ endpoint's report, its descriptor rings

They start when there is something to do and end after a while without. Each takes ops of one
endpoint at a time, its share of what waits and at most some MiB: the blocks of one prompt are copied
side by side, and the engine is not woken for each of many.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from workers.core.transfer_types import Op

_log = logging.getLogger(__name__)

MAX_COPIERS: Final = 4
CORES_A_COPIER: Final = 4
BATCH_BYTES: Final = 4 << 20
IDLE_SECONDS: Final = 5.0
_STILL_SECONDS: Final = 1.0


class Mover(Protocol):
    """An endpoint, as copiers see it."""

    def move(self, ops: Sequence[Op]) -> None:
        """Do these, in a copier's thread. Raises nothing."""


def num_copiers() -> int:
    """One for every four cores that this process may use, four at most: more do not make memory
    faster."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_COPIERS, cores // CORES_A_COPIER))


class Copiers:
    """Thread-safe. The queue is bounded by what the endpoints take."""

    def __init__(self, max_threads: int, name: str) -> None:
        self.max_threads = max_threads
        self._name = name
        self._queue: deque[tuple[Mover, Op]] = deque()
        self._queued_bytes = 0
        self._moving: Counter[Mover] = Counter()  # batches under way
        self._threads: set[threading.Thread] = set()
        self.num_busy = 0  # threads that copy now
        self._closing = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._still = threading.Condition(self._lock)

    def post(self, mover: Mover, ops: Sequence[Op]) -> None:
        """Have these moved, after what was posted before."""
        with self._lock:
            self._queue.extend((mover, op) for op in ops)
            self._queued_bytes += sum(op.length for op in ops)
            self._work.notify(len(ops))
            wanted = min(self.max_threads, self.num_busy + len(self._queue))
            for _ in range(wanted - len(self._threads)):
                self._start()

    def withdraw(self, mover: Mover, op_ids: Collection[int] | None = None) -> list[int]:
        """Take back what no thread has begun with, of these or of all; their ids."""
        with self._lock:
            mine = [
                op
                for owner, op in self._queue
                if owner is mover and (op_ids is None or op.id in op_ids)
            ]
            if mine:
                ids = {op.id for op in mine}
                kept = [(o, op) for o, op in self._queue if o is not mover or op.id not in ids]
                self._queue = deque(kept)
                self._queued_bytes -= sum(op.length for op in mine)
        return [op.id for op in mine]

    def wait_still(self, mover: Mover) -> None:
        """Until no thread is inside of `mover.move`: as long as one piece of a copy takes, where it
        has been told to stop."""
        with self._lock:
            while self._moving[mover]:
                self._still.wait(_STILL_SECONDS)
            del self._moving[mover]

    def close(self) -> None:
        """End the threads; what is queued is dropped. Idempotent."""
        with self._lock:
            self._closing = True
            self._queue.clear()
            self._queued_bytes = 0
            self._work.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout=5)

    # --- the threads ------------------------------------------------------------------------

    def _start(self) -> None:
        number = len(self._threads) + 1
        thread = threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # No more threads: those that there are copy, or the next post tries again.
            _log.warning("copier_not_started error=%s", error)
        else:
            self._threads.add(thread)

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            mover, ops = batch
            try:
                mover.move(ops)
            finally:
                with self._lock:
                    self._moving[mover] -= 1
                    self.num_busy -= 1
                    self._still.notify_all()

    def _take(self) -> tuple[Mover, list[Op]] | None:
        """The next batch; None: this thread is to end."""
        with self._lock:
            while not self._queue:
                woken = not self._closing and self._work.wait(IDLE_SECONDS)
                if not woken and not self._queue:
                    self._threads.discard(threading.current_thread())
                    return None
            mover, ops = self._pop()
            self._moving[mover] += 1
            self.num_busy += 1
        return mover, ops

    def _pop(self) -> tuple[Mover, list[Op]]:
        most = min(BATCH_BYTES, self._queued_bytes // self.max_threads)
        mover, op = self._queue.popleft()
        ops, num_bytes = [op], op.length
        while self._queue and self._queue[0][0] is mover:
            length = self._queue[0][1].length
            if num_bytes + length > most:
                break
            num_bytes += length
            ops.append(self._queue.popleft()[1])
        self._queued_bytes -= num_bytes
        return mover, ops
