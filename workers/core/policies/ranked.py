"""Policies whose order of blocks does not change with time alone: one heap with lazy entries.

A use only raises a rank, so an entry that is out of date lies too early in the heap and is put
right when it is met. What lowers a rank (a hint, new parameters) enters the heap anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from workers.core.ids import BlockHash
from workers.core.policies.base import Entry, EvictionPolicy

_MIN_HEAP_ENTRIES: Final = 64


class RankedPolicy(EvictionPolicy):
    """Evicts the candidate of the lowest (rank, tick)."""

    def __init__(self, params: Mapping[str, float] | None = None) -> None:
        super().__init__(params)
        self._heap: list[tuple[float, int, BlockHash]] = []

    def next_worth(self, now: float) -> float | None:
        entry = self._first()
        return None if entry is None else entry.rank

    def _worth(self, entry: Entry, now: float) -> float:
        return entry.rank

    def _leave(self, entry: Entry) -> None:
        """Its place in the heap is dropped when it is met."""

    def _evicted(self, entry: Entry) -> None:
        """Nothing is remembered."""

    def _tuned(self, old: Mapping[str, float], now: float) -> None:
        """Acts on uses and hints to come."""

    def _enqueue(self, entry: Entry) -> None:
        if not entry.queued:
            entry.queued = entry.tick
            heappush(self._heap, (entry.rank, entry.tick, entry.key))
            if len(self._heap) > 2 * len(self._entries) + _MIN_HEAP_ENTRIES:
                self._rebuild()

    def _lowered(self, entry: Entry) -> None:
        """The rank fell: the place in the heap, if any, is too late."""
        entry.tick = self._next_tick()
        entry.queued = 0
        if entry.candidate:
            self._enqueue(entry)

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
