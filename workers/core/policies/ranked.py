"""Policies whose order of blocks does not change with time alone: one heap with lazy entries.

A use only raises a rank, so a heap entry that is out of date lies too early and is put right when
it is met. What lowers a rank (a hint, new parameters) enters the heap anew.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from workers.core.ids import BlockHash
from workers.core.policies.base import Entry, EvictionPolicy, SessionHint
from workers.core.policies.params import Param

_MIN_HEAP_ENTRIES: Final = 64
HINT_PARAM: Final = Param(
    600, 0, 86_400, "by how many seconds a session's end or continuation ages or rejuvenates"
)


class RankedPolicy(EvictionPolicy):
    """Evicts the candidate of the lowest (rank, tick). A rank is in seconds, as if last used then.

    Equal times are ordered by `tick`, which counts uses from a chain's tail to its head.
    """

    declared = {"hint_seconds": HINT_PARAM}

    def __init__(self, params: Mapping[str, float] | None = None) -> None:
        super().__init__(params)
        self._heap: list[tuple[float, int, BlockHash]] = []

    @abstractmethod
    def _rank(self, entry: Entry) -> float:
        """By its uses as of the last one, without `entry.shift`."""

    def hint(self, keys: Sequence[BlockHash], session: SessionHint, now: float) -> None:
        """A shift until the next use. Blocks that others used since are left as they are."""
        entries = [self._entries[key] for key in keys if key in self._entries]
        seconds = self.params["hint_seconds"]
        for entry in reversed(entries):
            if entry.last_use <= entries[-1].last_use:
                entry.shift = seconds if session == "continue" else -seconds
                self._rerank(entry)

    def next_worth(self, now: float) -> float | None:
        entry = self._first()
        return None if entry is None else entry.rank

    def _worth(self, entry: Entry, now: float) -> float:
        return entry.rank

    def _arrive(self, entry: Entry, now: float, label: str) -> None:
        self._tick += 1
        entry.tick = self._tick
        entry.rank = self._rank(entry)

    def _adopted(self, entry: Entry, now: float) -> None:
        entry.tick = self._next_tick()
        entry.rank = self._rank(entry)

    def _leave(self, entry: Entry) -> None:
        """Its place in the heap is dropped when it is met."""

    def _evicted(self, entries: Sequence[Entry]) -> None:
        """Nothing is remembered."""

    def _tuned(self, old: Mapping[str, float], now: float) -> None:
        for entry in self._entries.values():
            entry.rank = self._rank(entry) + entry.shift
        self._rebuild()

    # --- the heap ---------------------------------------------------------------------------

    def _rerank(self, entry: Entry) -> None:
        """The rank may have fallen: then its place in the heap, if any, is too late."""
        entry.tick = self._next_tick()
        entry.rank = self._rank(entry) + entry.shift
        entry.queued = 0
        if entry.candidate:
            self._enqueue(entry)

    def _enqueue(self, entry: Entry) -> None:
        if not entry.queued:
            entry.queued = entry.tick
            heappush(self._heap, (entry.rank, entry.tick, entry.key))
            if len(self._heap) > 2 * len(self._entries) + _MIN_HEAP_ENTRIES:
                self._rebuild()

    def _rebuild(self) -> None:
        """One heap entry a candidate, none else."""
        for entry in self._entries.values():
            entry.queued = entry.tick if entry.candidate else 0
        self._heap = [(e.rank, e.tick, e.key) for e in self._entries.values() if e.candidate]
        heapify(self._heap)

    def _pop(self, now: float) -> Entry | None:
        entry = self._first()
        if entry is not None:
            heappop(self._heap)
            entry.queued = 0
        return entry

    def _first(self) -> Entry | None:
        """The least candidate, whose heap entry is the first and up to date."""
        heap, entries = self._heap, self._entries
        while heap:
            _, tick, key = heap[0]
            entry = entries.get(key)
            if entry is None or entry.queued != tick:
                heappop(heap)
            elif not entry.candidate:
                heappop(heap)
                entry.queued = 0
            elif entry.tick == tick:
                return entry
            else:
                entry.queued = entry.tick
                heapreplace(heap, (entry.rank, entry.tick, key))
        return None
