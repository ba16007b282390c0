"""What policies remember of blocks that were evicted, so that a late return is no first use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from workers.core.ids import BlockHash
from workers.core.policies.base import Entry
from workers.core.policies.params import Param

HISTORY_PARAM: Final = Param(
    65_536, 0, 10_000_000, "the number of evicted blocks whose uses are remembered"
)


class EvictedUses:
    """Entries of the last `max_blocks` evicted blocks. Policies of one pool share it."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._past: OrderedDict[BlockHash, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._past)

    def take(self, key: BlockHash) -> Entry | None:
        """The entry with which a block left; it is not remembered any longer."""
        return self._past.pop(key, None)

    def keep(self, entries: Iterable[Entry]) -> None:
        past = self._past
        for entry in entries:
            past.pop(entry.key, None)  # so that it is the latest
            past[entry.key] = entry
        while len(past) > self._max_blocks:
            past.popitem(last=False)

    def bound(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self.keep(())
