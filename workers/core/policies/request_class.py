"""Keep value learned by request class: how soon blocks of that class came back before.

The victim is the candidate of the lowest value among the oldest and the newest of each class. The
newest end is what gives admission control in a tiny pool: where nothing new ever returns in time,
the new goes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Self

from workers.core.ids import BlockHash
from workers.core.policies.base import Entry, EvictionPolicy, SessionHint
from workers.core.policies.class_tables import ClassTables, Segment
from workers.core.policies.memory import HISTORY_PARAM, EvictedUses
from workers.core.policies.params import Param
from workers.core.policies.ranked import HINT_PARAM

_OVER: Final = -1
_GOES_ON: Final = -2
_PROMISED: Final = 1.0
"""Value of a block whose session goes on, in returns a second: above what is ever learned."""
_MIN_HEAP_ENTRIES: Final = 64


class _Ends:
    """Candidates of one class from both ends, with lazy entries (age order, tick, key)."""

    __slots__ = ("newest", "oldest")

    def __init__(self) -> None:
        self.oldest: list[tuple[float, int, BlockHash]] = []
        self.newest: list[tuple[float, int, BlockHash]] = []


class ClassPolicy(EvictionPolicy):
    """`group` is the class, `queued` the tick under which the entry lies in that class's heaps."""

    name = "class"
    declared = {
        "pseudo_blocks": Param(
            300, 1, 100_000, "the number of blocks at which a class outweighs its parent class"
        ),
        "memory_seconds": Param(
            3600, 10, 31_536_000, "the time after which what was learned counts half, in seconds"
        ),
        "history_blocks": HISTORY_PARAM,
        "hint_seconds": HINT_PARAM,
    }

    def __init__(self, params: Mapping[str, float] | None = None) -> None:
        super().__init__(params)
        self._tables = ClassTables(self.params["pseudo_blocks"], self.params["memory_seconds"])
        self._gone = EvictedUses(int(self.params["history_blocks"]))
        self._ends: dict[int, _Ends] = {}
        self._segments: dict[int, Segment] = {}  # the last one of each class
        self._going_on: tuple[float, str] = (-1.0, "")  # time and name of the last request held
        self._again: tuple[int, bool, float] | None = None  # where the last victim came from

    def accessed(
        self, keys: Sequence[BlockHash], now: float, label: str = "", request: str = ""
    ) -> None:
        self._tables.advance(now)
        if len(keys) > 1:
            self._going_on = (now, request)
        for key in reversed(keys):  # tail first, so that the tail is the older
            entry = self._entries.get(key)
            if entry is None:
                continue
            if not request or entry.request != request:
                entry.request = request
                entry.uses += 1
                self._come_back(entry.segment, now)
            elif isinstance(entry.segment, Segment):
                entry.segment.waiting -= 1
            entry.last_use = now
            self._classify(entry, False, label, now)

    def hint(self, keys: Sequence[BlockHash], session: SessionHint, now: float) -> None:
        """Out of its class until the next use. Blocks that others used since stay."""
        entries = [self._entries[key] for key in keys if key in self._entries]
        for entry in reversed(entries):
            if entry.last_use <= entries[-1].last_use:
                self._put(entry, _GOES_ON if session == "continue" else _OVER)

    def sibling(self) -> Self:
        other = super().sibling()
        other._gone, other._tables = self._gone, self._tables
        return other

    def next_worth(self, now: float) -> float | None:
        found = self._least(now)
        return None if found is None else found[0]

    def _worth(self, entry: Entry, now: float) -> float:
        return self._value(entry.group, now - entry.last_use)

    def _arrive(self, entry: Entry, now: float, label: str) -> None:
        self._tables.advance(now)
        past = self._gone.take(entry.key)
        if past is not None:
            entry.uses += past.uses
            self._come_back(past.segment, now)
        held_at, request = self._going_on
        continuing = request == entry.request if entry.request else held_at == now
        self._classify(entry, continuing, label, now)

    def _adopted(self, entry: Entry, now: float) -> None:
        past = self._gone.take(entry.key)
        if past is not None:
            entry.segment = past.segment
        self._put(entry, self._tables.class_of(entry.uses, False, ""))

    def _evicted(self, entries: Sequence[Entry]) -> None:
        self._gone.keep(entries)

    def _leave(self, entry: Entry) -> None:
        """Its places in the heaps are dropped when they are met."""

    def _tuned(self, old: Mapping[str, float], now: float) -> None:
        self._tables.pseudo_blocks = self.params["pseudo_blocks"]
        self._tables.half_life_seconds = self.params["memory_seconds"]
        self._tables.rebuild()
        self._gone.bound(int(self.params["history_blocks"]))

    # --- classes ----------------------------------------------------------------------------

    def _come_back(self, segment: object, now: float) -> None:
        if isinstance(segment, Segment):
            self._tables.came_back(segment, now)

    def _classify(self, entry: Entry, continuing: bool, label: str, now: float) -> None:
        group = self._tables.class_of(entry.uses, continuing, label)
        segment = self._tables.used(self._segments.get(group), group, now)
        self._segments[group] = entry.segment = segment
        self._put(entry, group)

    def _value(self, group: int, age: float) -> float:
        if group >= 0:
            return self._tables.value(group, age)
        return _PROMISED if group == _GOES_ON and age <= self.params["hint_seconds"] else 0.0

    # --- the heaps --------------------------------------------------------------------------

    def _put(self, entry: Entry, group: int) -> None:
        entry.group = group
        entry.tick = self._next_tick()
        if entry.candidate:
            self._enqueue(entry)

    def _enqueue(self, entry: Entry) -> None:
        if entry.queued == entry.tick:
            return
        entry.queued = entry.tick
        ends = self._ends.get(entry.group)
        if ends is None:
            ends = self._ends[entry.group] = _Ends()
        heappush(ends.oldest, (entry.last_use, entry.tick, entry.key))
        heappush(ends.newest, (-entry.last_use, -entry.tick, entry.key))
        if max(len(ends.oldest), len(ends.newest)) > 2 * len(self._entries) + _MIN_HEAP_ENTRIES:
            self._rebuild(entry.group, ends)

    def _rebuild(self, group: int, ends: _Ends) -> None:
        mine = [e for e in self._entries.values() if e.group == group and e.queued == e.tick]
        ends.oldest = [(e.last_use, e.tick, e.key) for e in mine]
        ends.newest = [(-e.last_use, -e.tick, e.key) for e in mine]
        heapify(ends.oldest)
        heapify(ends.newest)

    def _pop(self, now: float) -> Entry | None:
        """The least; after a victim, others of the same class and time without looking further."""
        if self._again is not None and self._picked:
            group, newest, last_use = self._again
            entry = self._top(self._ends[group], newest)
            if entry is not None and entry.last_use == last_use:
                return self._taken(entry, newest)
        found = self._least(now)
        if found is None:
            return None
        _, entry, newest = found
        self._again = (entry.group, newest, entry.last_use)
        return self._taken(entry, newest)

    def _taken(self, entry: Entry, newest: bool) -> Entry:
        ends = self._ends[entry.group]
        heappop(ends.newest if newest else ends.oldest)
        entry.queued = 0
        return entry

    def _least(self, now: float) -> tuple[float, Entry, bool] | None:
        """The lowest value, whose it is, and whether it is the newest of its class."""
        least: tuple[float, Entry, bool] | None = None
        for group, ends in self._ends.items():
            for newest in (False, True):
                entry = self._top(ends, newest)
                if entry is None:
                    break
                value = self._value(group, now - entry.last_use)
                if least is None or (value, entry.last_use) < (least[0], least[1].last_use):
                    least = (value, entry, newest)
        return least

    def _top(self, ends: _Ends, newest: bool) -> Entry | None:
        heap = ends.newest if newest else ends.oldest
        while heap:
            _, tick, key = heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.queued == entry.tick == abs(tick):
                if entry.candidate:
                    return entry
                entry.queued = 0
            heappop(heap)
        return None
