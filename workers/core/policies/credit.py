"""Credit for past reuses, in O(1): one list by last use for each number of reuses.

A block's deadline is its last use and a credit that grows with the logarithm of its reuses. Each
list is in order of deadlines, so the victim is the earliest of the lists' heads. A head that is no
candidate is parked, and comes back to the head of its list when it is offered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import log2
from typing import Final, Self

from workers.core.ids import BlockHash
from workers.core.policies.base import Entry, EvictionPolicy, SessionHint
from workers.core.policies.memory import HISTORY_PARAM, EvictedUses
from workers.core.policies.params import Param
from workers.core.policies.ranked import HINT_PARAM

NUM_LEVELS: Final = 8
_OVER: Final = NUM_LEVELS  # list of blocks whose session is over
_GOES_ON: Final = NUM_LEVELS + 1
_NUM_LISTS: Final = NUM_LEVELS + 2


class CreditPolicy(EvictionPolicy):
    """`group` is the entry's list, `rank` its deadline, `queued` 1 while it is in the list."""

    name = "credit"
    declared = {
        "credit_seconds": Param(
            200,
            0,
            86_400,
            "by how many seconds a reused block counts as younger, for each doubling",
        ),
        "history_blocks": HISTORY_PARAM,
        "hint_seconds": HINT_PARAM,
    }

    def __init__(self, params: Mapping[str, float] | None = None) -> None:
        super().__init__(params)
        self._lists: list[OrderedDict[BlockHash, Entry]] = [
            OrderedDict() for _ in range(_NUM_LISTS)
        ]
        self._gone = EvictedUses(int(self.params["history_blocks"]))
        self._credits = self._credit_of_levels()

    def accessed(
        self, keys: Sequence[BlockHash], now: float, label: str = "", request: str = ""
    ) -> None:
        entries, lists, bonuses = self._entries, self._lists, self._credits
        for key in reversed(keys):  # tail first, so that the tail is the older
            entry = entries.get(key)
            if entry is None:
                continue
            if entry.queued:
                del lists[entry.group][key]
            if not request or entry.request != request:
                entry.request = request
                entry.uses += 1
            entry.last_use = now
            level = entry.uses - 1 if entry.uses < NUM_LEVELS else NUM_LEVELS - 1
            entry.group = level
            entry.rank = now + bonuses[level]
            entry.queued = 1
            lists[level][key] = entry

    def hint(self, keys: Sequence[BlockHash], session: SessionHint, now: float) -> None:
        """Out of its level until the next use. Blocks that others used since stay."""
        entries = [self._entries[key] for key in keys if key in self._entries]
        seconds = self.params["hint_seconds"]
        for entry in reversed(entries):
            if entry.last_use <= entries[-1].last_use:
                group = _GOES_ON if session == "continue" else _OVER
                self._place(entry, group, now + (seconds if group == _GOES_ON else -seconds))

    def sibling(self) -> Self:
        other = super().sibling()
        other._gone = self._gone
        return other

    def next_worth(self, now: float) -> float | None:
        entry = self._first()
        return None if entry is None else entry.rank

    def _worth(self, entry: Entry, now: float) -> float:
        return entry.rank

    def _arrive(self, entry: Entry, now: float, label: str) -> None:
        past = self._gone.take(entry.key)
        if past is not None:
            entry.uses += past.uses
        self._place_by_uses(entry)

    def _adopted(self, entry: Entry, now: float) -> None:
        self._gone.take(entry.key)
        self._place_by_uses(entry)

    def _evicted(self, entries: Sequence[Entry]) -> None:
        self._gone.keep(entries)

    def _leave(self, entry: Entry) -> None:
        if entry.queued:
            del self._lists[entry.group][entry.key]

    def _tuned(self, old: Mapping[str, float], now: float) -> None:
        self._credits = self._credit_of_levels()
        self._gone.bound(int(self.params["history_blocks"]))
        for entry in sorted(self._entries.values(), key=lambda entry: entry.last_use):
            if entry.group < NUM_LEVELS:
                self._place_by_uses(entry)

    # --- the lists --------------------------------------------------------------------------

    def _credit_of_levels(self) -> list[float]:
        return [self.params["credit_seconds"] * log2(1 + level) for level in range(NUM_LEVELS)]

    def _place_by_uses(self, entry: Entry) -> None:
        level = min(entry.uses, NUM_LEVELS) - 1
        self._place(entry, level, entry.last_use + self._credits[level])

    def _place(self, entry: Entry, group: int, rank: float) -> None:
        """To the end of that list."""
        if entry.queued:
            del self._lists[entry.group][entry.key]
        entry.group, entry.rank, entry.queued = group, rank, 1
        self._lists[group][entry.key] = entry

    def _enqueue(self, entry: Entry) -> None:
        if not entry.queued:
            entry.queued = 1
            self._lists[entry.group][entry.key] = entry
            self._lists[entry.group].move_to_end(entry.key, last=False)

    def _pop(self, now: float) -> Entry | None:
        entry = self._next_alike() or self._first()
        if entry is not None:
            del self._lists[entry.group][entry.key]
            entry.queued = 0
        return entry

    def _next_alike(self) -> Entry | None:
        """After a victim, one of the same list and deadline, without looking further."""
        if not self._picked:
            return None
        last = self._picked[-1]
        head = self._head(self._lists[last.group])
        return head if head is not None and head.rank == last.rank else None

    def _first(self) -> Entry | None:
        first: Entry | None = None
        for entries in self._lists:
            head = self._head(entries)
            if head is not None and (first is None or head.rank < first.rank):
                first = head
        return first

    @staticmethod
    def _head(entries: OrderedDict[BlockHash, Entry]) -> Entry | None:
        """The first candidate; what lies before it is parked."""
        while entries:
            key, entry = next(iter(entries.items()))
            if entry.candidate:
                return entry
            del entries[key]
            entry.queued = 0
        return None
