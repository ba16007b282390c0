"""What policies remember of blocks that were evicted, so that a late return is no first use."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from workers.core.ids import BlockHash
from workers.core.policies.params import Param

HISTORY_PARAM: Final = Param(
    65_536, 0, 10_000_000, "the number of evicted blocks whose uses are remembered"
)


class PastUse(NamedTuple):
    """`heat` is the decayed number of uses as of `last_use`; `sharers` is a sketch of who used it."""

    last_use: float
    prev_use: float
    uses: int
    heat: float
    sharers: int
    segment: object = None


class EvictedUses:
    """The last `max_blocks` evicted blocks, oldest first. Policies of one pool share it."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._past: OrderedDict[BlockHash, PastUse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._past)

    def take(self, key: BlockHash) -> PastUse | None:
        return self._past.pop(key, None)

    def keep(self, key: BlockHash, past: PastUse) -> None:
        self._past[key] = past
        self._past.move_to_end(key)
        if len(self._past) > self._max_blocks:
            self._past.popitem(last=False)

    def bound(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        while len(self._past) > max_blocks:
            self._past.popitem(last=False)
