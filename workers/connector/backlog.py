"""Blocks that the pool did not take at once, kept in this worker's memory until it does.

A refusal is mostly short: the write queue is full, or pins hold every slot. The bytes are copied
away while the device still holds them, and offered again in the background; so neither an engine
step nor a device block waits for the pool. What the pool does not take in time is a hole: it is
dropped, and counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from workers.core.messages import PreparedStore

_SPARE_BYTES = 64 << 20  # of emptied buffers kept for the next refusal: touching memory is slow
_ANSWER_SECONDS = 2.0  # a late answer that did not come by then does not come


@dataclass(slots=True, eq=False)
class KeptRun:
    """A run of one chain in order, each block with its bytes.

    `asked` means that an answer is on its way: what it grants belongs to `owner`.
    """

    owner: str
    namespace: bytes
    tenant: str
    parent: bytes
    block_hashes: list[bytes]
    kept_at: float
    asked: bool = False
    granted: PreparedStore | None = None
    payloads: list[torch.Tensor] = field(default_factory=list)

    def is_due(self, now: float) -> bool:
        """Offer it: the answer has come, or none is to be expected."""
        waits = self.asked and self.granted is None
        return not waits or now - self.kept_at > _ANSWER_SECONDS


@dataclass(slots=True)
class BacklogCounts:
    """Blocks, cumulative. A hole is a run that ends short of what was computed."""

    kept: int = 0
    retried: int = 0
    expired: int = 0
    holes: int = 0


class Backlog:
    """Thread-safe: the worker's main thread keeps, the store thread offers."""

    def __init__(self, block_bytes: int, bound_bytes: int, max_age_seconds: float) -> None:
        self._block_bytes = block_bytes
        self._bound = bound_bytes // block_bytes
        self._max_age = max_age_seconds
        self._runs: deque[KeptRun] = deque()
        self._keys: set[bytes] = set()
        self._num_blocks = 0
        self._spare: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self.counts = BacklogCounts()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def share(self) -> float:
        """How full it is, 0 to 1."""
        return self._num_blocks / self._bound if self._bound else 1.0

    def follows(self, parent: bytes) -> bool:
        """Is the block before a chain's next one kept here? Then so must be the next."""
        with self._lock:
            return parent in self._keys

    def keep(
        self, run: KeptRun, gather: Callable[[int, list[torch.Tensor]], None], bound_blocks: int
    ) -> int:
        """Copy what fits of `run`; `gather(first, into)` fills payloads from that block of it on, all
        at once: a device takes long to begin a copy. Returns how many of its blocks are here then.

        `bound_blocks` is the pool's own bound on writes, which holds here as well.
        """
        known = self._leave_known(run)
        total = len(run.block_hashes)
        fits = max(0, min(total, min(self._bound, bound_blocks) - self._num_blocks))
        run.payloads += [self._buffer() for _ in range(fits)]
        if fits:
            gather(known, run.payloads)
        del run.block_hashes[fits:]
        with self._lock:
            self.counts.kept += fits
            self.counts.holes += fits < total
            if fits:
                self._runs.append(run)
                self._num_blocks += fits
                self._keys.update(run.block_hashes)
        return known + fits

    def _leave_known(self, run: KeptRun) -> int:
        """What another request with this prefix has here already; how many blocks."""
        with self._lock:
            known = 0
            while known < len(run.block_hashes) and run.block_hashes[known] in self._keys:
                known += 1
        if known:
            run.asked = False  # its answer would be about more
            run.parent = run.block_hashes[known - 1]
            del run.block_hashes[:known]
        return known

    def grant(self, owner: str, first_hash: bytes, answer: PreparedStore) -> bool:
        """A late answer came; False where no run here waits for it."""
        with self._lock:
            for run in self._runs:
                if run.asked and run.owner == owner and run.block_hashes[0] == first_hash:
                    run.granted = answer
                    return True
        return False

    def retry(self, offer: Callable[[KeptRun], int], now: float) -> bool | None:
        """Offer each run that is due once; whether the pool took anything, None without runs.

        `offer` returns how many blocks from the run's head are no longer of concern.
        """
        self._expire(now)
        with self._lock:
            runs = list(self._runs)
        if not runs:
            return None
        taken = 0
        for run in runs:
            if run.is_due(now):
                count = offer(run)
                self._taken(run, count)
                taken += count
        return taken > 0

    def _taken(self, run: KeptRun, count: int) -> None:
        with self._lock:
            run.asked, run.granted = False, None
            self.counts.retried += count
            if count:
                run.parent = run.block_hashes[count - 1]
                self._forget(run.block_hashes[:count], run.payloads[:count])
                del run.block_hashes[:count], run.payloads[:count]
            if not run.block_hashes:
                self._runs.remove(run)

    def _expire(self, now: float) -> None:
        with self._lock:
            for run in [run for run in self._runs if now - run.kept_at > self._max_age]:
                self._runs.remove(run)
                self._forget(run.block_hashes, run.payloads)
                self.counts.expired += len(run.block_hashes)
                self.counts.holes += 1

    def _forget(self, keys: list[bytes], payloads: list[torch.Tensor]) -> None:
        self._num_blocks -= len(keys)
        self._keys.difference_update(keys)
        room = _SPARE_BYTES // self._block_bytes - len(self._spare)
        self._spare += payloads[: max(0, room)]

    def _buffer(self) -> torch.Tensor:
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return torch.empty(self._block_bytes, dtype=torch.uint8)
