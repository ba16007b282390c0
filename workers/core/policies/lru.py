"""Least recently used first."""

from __future__ import annotations

from collections.abc import Sequence

from workers.core.ids import BlockHash
from workers.core.policies.base import Entry
from workers.core.policies.ranked import RankedPolicy


class LruPolicy(RankedPolicy):
    """The baseline. A use of a block is a use of its ancestors, since their tail goes first."""

    name = "lru"
    keeps_partial_blocks = True

    def accessed(
        self, keys: Sequence[BlockHash], now: float, label: str = "", request: str = ""
    ) -> None:
        entries = self._entries
        tick = self._tick
        for key in reversed(keys):  # tail first, so that the tail is the older
            entry = entries.get(key)
            if entry is None:
                continue
            tick += 1
            entry.tick = tick
            entry.last_use = now
            if entry.rank > now:  # a promise kept: the place in the heap is too late
                entry.queued = 0
                if entry.candidate:
                    entry.rank = now
                    self._enqueue(entry)
            entry.rank = now
            entry.shift = 0.0
            if not request or entry.request != request:
                entry.request = request
                entry.uses += 1
        self._tick = tick

    def _arrive(self, entry: Entry, now: float, label: str) -> None:
        self._tick += 1
        entry.tick = self._tick

    def _rank(self, entry: Entry) -> float:
        return entry.last_use
