"""Policies by heat: every use of a block adds one, and it halves with every half life of silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Self
from zlib import crc32

from workers.core.ids import BlockHash
from workers.core.policies.base import BlockUse, Entry
from workers.core.policies.memory import HISTORY_PARAM, EvictedUses
from workers.core.policies.params import Param
from workers.core.policies.ranked import HINT_PARAM, RankedPolicy

SHARER_BITS: Final = 128
HALF_LIFE_MEANING: Final = "the silence that halves what uses are worth, in seconds"


class HeatPolicy(RankedPolicy):
    """Keeps heat up to date, also that of blocks evicted lately; `_rank` makes an order of it."""

    declared = {
        "half_life_seconds": Param(240, 1, 86_400, HALF_LIFE_MEANING),
        "history_blocks": HISTORY_PARAM,
        "hint_seconds": HINT_PARAM,
    }
    counts_sharers = False

    def __init__(self, params: Mapping[str, float] | None = None) -> None:
        super().__init__(params)
        self._gone = EvictedUses(int(self.params["history_blocks"]))
        self._per_second = self._fading()

    def accessed(
        self, keys: Sequence[BlockHash], now: float, label: str = "", request: str = ""
    ) -> None:
        entries, rank_of = self._entries, self._rank
        tick, per_second = self._tick, self._per_second
        for key in reversed(keys):  # tail first, so that the tail is the older
            entry = entries.get(key)
            if entry is None:
                continue
            tick += 1
            entry.tick = tick
            fading = 2.0 ** ((entry.last_use - now) * per_second)
            if request and entry.request == request:
                entry.heat = max(1.0, entry.heat * fading)
            else:
                entry.heat = 1.0 + entry.heat * fading
                entry.uses += 1
                entry.prev_use = entry.last_use
                entry.request = request
                if self.counts_sharers:
                    entry.sharers |= _sharer_bit(request, tick)
            entry.last_use = now
            entry.shift = 0.0
            rank = rank_of(entry)
            if rank < entry.rank:
                entry.queued = 0
                if entry.candidate:
                    entry.rank = rank
                    self._enqueue(entry)
            entry.rank = rank
        self._tick = tick

    def sibling(self) -> Self:
        other = super().sibling()
        other._gone = self._gone
        return other

    def _fading(self) -> float:
        """Halvings of heat a second."""
        return 1.0 / self.params["half_life_seconds"]

    def _export(self, entry: Entry) -> BlockUse:
        return BlockUse(entry.key, entry.last_use, entry.uses, entry.candidate, entry.heat)

    def _arrive(self, entry: Entry, now: float, label: str) -> None:
        past = self._gone.take(entry.key)
        if past is not None:
            entry.heat += past.heat * 2.0 ** ((past.last_use - now) * self._per_second)
            entry.uses += past.uses
            entry.prev_use = past.last_use
            entry.sharers = past.sharers
        if self.counts_sharers:
            entry.sharers |= _sharer_bit(entry.request, self._tick)
        self._tick += 1
        entry.tick = self._tick
        entry.rank = self._rank(entry)

    def _adopted(self, entry: Entry, now: float) -> None:
        past = self._gone.take(entry.key)
        if past is not None and past.last_use == entry.last_use:
            entry.prev_use, entry.heat, entry.sharers = past.prev_use, past.heat, past.sharers
        super()._adopted(entry, now)

    def _evicted(self, entries: Sequence[Entry]) -> None:
        self._gone.keep(entries)

    def _tuned(self, old: Mapping[str, float], now: float) -> None:
        self._per_second = self._fading()
        self._gone.bound(int(self.params["history_blocks"]))
        super()._tuned(old, now)


def _sharer_bit(request: str, tick: int) -> int:
    """A request without a name is somebody new."""
    return 1 << (crc32(request.encode()) if request else tick * 2_654_435_761) % SHARER_BITS
