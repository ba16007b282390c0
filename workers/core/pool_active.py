"""Keeps the newest blocks of active sequences from eviction, within a share of the pool.

A block that is kept keeps its ancestors too, since tails go first: so a sequence takes its whole
length of that share, and one that is longer than the share is not kept.

A sequence is active for some time after its last use; it is known by the last block used. A use
that goes on from there replaces it, so that each conversation is kept once, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from workers.core.blocks import Block
from workers.core.quotas import Group

LOOK_BACK_BLOCKS: Final = 256


class _Tail(NamedTuple):
    blocks: tuple[Block, ...]
    depth: int  # with all ancestors
    deadline: float


class ActiveTails:
    """`changed` is called for each block whose `keeps` changed."""

    def __init__(self, changed: Callable[[Block], None]) -> None:
        self._changed = changed
        self._tails: dict[Block, _Tail] = {}  # by last block, least recently used first
        self._num_kept = 0

    def __len__(self) -> int:
        return len(self._tails)

    @property
    def num_kept(self) -> int:
        """Blocks kept with their ancestors, counted once a sequence."""
        return self._num_kept

    def used(self, chain: Sequence[Block], blocks_each: int, most: int, deadline: float) -> None:
        """A request uses this chain: keep its end until `deadline`, `most` blocks in all."""
        if not chain or blocks_each < 1:
            return
        for block in reversed(chain[-LOOK_BACK_BLOCKS:]):
            if self._drop(block):
                break
        depth = chain[-1].depth
        if depth > most:
            return
        tail = tuple(islice(_upwards(chain[-1]), blocks_each))
        self._tails[chain[-1]] = _Tail(tail, depth, deadline)
        self._num_kept += depth
        for block in tail:
            block.keeps += 1
            self._changed(block)
        self.limit(most)

    def limit(self, most: int) -> None:
        """Keep at most so many blocks, the sequences used last."""
        while self._num_kept > most:
            self._drop(next(iter(self._tails)))

    def over(self, chain: Iterable[Block]) -> None:
        """The sequences that end in this chain are not active any more."""
        for block in chain:
            self._drop(block)

    def give_up(self, group: Group) -> int:
        """A tenant or namespace at its quota keeps nothing from itself; how many sequences."""
        ended = [last for last in self._tails if group in last.groups]
        for last in ended:
            self._drop(last)
        return len(ended)

    def expire(self, now: float) -> None:
        while self._tails:
            last, tail = next(iter(self._tails.items()))
            if tail.deadline > now:
                return
            self._drop(last)

    def _drop(self, last: Block) -> bool:
        tail = self._tails.pop(last, None)
        if tail is None:
            return False
        self._num_kept -= tail.depth
        for block in tail.blocks:
            block.keeps -= 1
            self._changed(block)
        return True


def _upwards(block: Block | None) -> Iterator[Block]:
    while block is not None:
        yield block
        block = block.parent
