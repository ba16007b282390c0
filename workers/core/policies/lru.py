"""Least recently used first. A use of a block is a use of its ancestors."""

from __future__ import annotations

from collections.abc import Sequence

from workers.core.ids import BlockHash
from workers.core.policies.base import Entry, SessionHint
from workers.core.policies.params import Param
from workers.core.policies.ranked import RankedPolicy

HINT_MEANING = (
    "by how many seconds a session's end or continuation makes its blocks older or younger"
)


class LruPolicy(RankedPolicy):
    """`rank` is the time of the last use, moved by hints."""

    name = "lru"
    declared = {"hint_seconds": Param(600, 0, 86_400, HINT_MEANING)}
    keeps_partial_blocks = True

    def accessed(
        self, keys: Sequence[BlockHash], now: float, label: str = "", request: str = ""
    ) -> None:
        entries = self._entries
        tick = self._tick
        for key in reversed(keys):  # tail first, so that the tail is the older
            entry = entries.get(key)
            if entry is not None:
                tick += 1
                entry.tick = tick
                if entry.rank < now:
                    entry.rank = now
                entry.last_use = now
                if not request or entry.request != request:
                    entry.request = request
                    entry.uses += 1
        self._tick = tick

    def hint(self, keys: Sequence[BlockHash], session: SessionHint, now: float) -> None:
        entries = [self._entries[key] for key in keys if key in self._entries]
        shift = self.params["hint_seconds"]
        for entry in entries:
            if session == "continue":
                entry.rank = max(entry.rank, now + shift)
                entry.tick = self._next_tick()
            elif entry.last_use <= entries[-1].last_use:  # others have not used it since
                entry.rank = min(entry.rank, now - shift)
                self._lowered(entry)

    def _arrive(self, entry: Entry, now: float, label: str) -> None:
        entry.tick = self._next_tick()
