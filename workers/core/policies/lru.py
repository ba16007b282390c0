"""Least recently used first. A use of a block is a use of its ancestors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from workers.core.ids import BlockHash
from workers.core.policies.base import EvictionPolicy

_MIN_HEAP_ENTRIES: Final = 64


class LruPolicy(EvictionPolicy):
    """A heap with lazy entries: one that is out of date is dropped or put right when met."""

    def __init__(self) -> None:
        self._tick = 0
        self._used: dict[BlockHash, int] = {}
        self._candidates: set[BlockHash] = set()
        self._heap: list[tuple[int, BlockHash]] = []

    def stored(self, key: BlockHash, now: float) -> None:
        self._tick += 1
        self._used[key] = self._tick

    def accessed(self, keys: Sequence[BlockHash], now: float) -> None:
        for key in reversed(keys):  # tail first, so that the tail is the older
            if key in self._used:
                self._tick += 1
                self._used[key] = self._tick

    def removed(self, key: BlockHash) -> None:
        self._used.pop(key, None)
        self._candidates.discard(key)

    def offer(self, key: BlockHash) -> None:
        if key not in self._candidates:
            self._candidates.add(key)
            self._push(key)

    def withhold(self, key: BlockHash) -> None:
        self._candidates.discard(key)

    def evict(
        self, num_blocks: int, uncovers: Callable[[BlockHash], BlockHash | None]
    ) -> list[BlockHash] | None:
        victims: list[tuple[BlockHash, int]] = []
        uncovered: list[tuple[BlockHash, int]] = []
        while len(victims) < num_blocks:
            victim = self._pop()
            if victim is None:
                self._restore(victims, uncovered)
                return None
            used = self._used.pop(victim)
            victims.append((victim, used))
            parent = uncovers(victim)
            if parent is not None:
                uncovered.append((parent, self._used[parent]))
                self._used[parent] = max(self._used[parent], used)
                self.offer(parent)
        return [key for key, _ in victims]

    def num_candidates(self) -> int:
        return len(self._candidates)

    def _pop(self) -> BlockHash | None:
        """Take the oldest candidate."""
        while self._heap:
            used, key = heappop(self._heap)
            if key not in self._candidates:
                continue
            if self._used[key] != used:
                heappush(self._heap, (self._used[key], key))
                continue
            self._candidates.remove(key)
            return key
        return None

    def _restore(
        self, victims: list[tuple[BlockHash, int]], uncovered: list[tuple[BlockHash, int]]
    ) -> None:
        for key, used in victims:
            self._used[key] = used
            self.offer(key)
        for key, used in uncovered:
            self._used[key] = used
            self.withhold(key)

    def _push(self, key: BlockHash) -> None:
        if len(self._heap) > 2 * len(self._candidates) + _MIN_HEAP_ENTRIES:
            self._heap = [(self._used[key], key) for key in self._candidates]
            heapify(self._heap)
        else:
            heappush(self._heap, (self._used[key], key))
