"""Blocks as a pool keeps them, for tests of what chooses among them."""

from __future__ import annotations

import pytest

from workers.core.ids import BlockHash
from workers.core.policies.base import EvictionPolicy


def block_key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16))


class Forest:
    """A parent for each block, pins, and a policy told of it all."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.now = 0.0
        self.parent: dict[BlockHash, BlockHash | None] = {}
        self.pinned: set[BlockHash] = set()

    def store(self, block: BlockHash, parent: BlockHash | None = None, request: str = "") -> None:
        self.parent[block] = parent
        self.policy.stored(block, self.now, "", request)
        self.refresh()

    def chain(self, first: int, length: int) -> list[BlockHash]:
        """A new chain of blocks `first`, `first` + 1, ..., head first."""
        blocks = [block_key(first + i) for i in range(length)]
        for i, block in enumerate(blocks):
            self.store(block, blocks[i - 1] if i else None)
        return blocks

    def path(self, block: BlockHash) -> list[BlockHash]:
        """The block's chain, head first."""
        line: list[BlockHash] = []
        at: BlockHash | None = block
        while at is not None:
            line.append(at)
            at = self.parent[at]
        return line[::-1]

    def use(self, block: BlockHash, request: str = "", label: str = "") -> None:
        self.policy.accessed(self.path(block), self.now, label, request)

    def pin(self, block: BlockHash) -> None:
        self.pinned.add(block)
        self.refresh()

    def unpin(self, block: BlockHash) -> None:
        self.pinned.discard(block)
        self.refresh()

    def children(self, block: BlockHash) -> list[BlockHash]:
        return [child for child, parent in self.parent.items() if parent == block]

    def remove(self, block: BlockHash) -> None:
        """As a pool withdraws a block: with all that hangs on it."""
        for child in self.children(block):
            self.remove(child)
        del self.parent[block]
        self.pinned.discard(block)
        self.policy.removed(block)
        self.refresh()

    def evictable(self) -> set[BlockHash]:
        return {b for b in self.parent if b not in self.pinned and not self.children(b)}

    def num_evictable(self) -> int:
        """That could go one after the other: not what a pinned block stands on."""
        kept = {b for pinned in self.pinned for b in self.path(pinned)}
        return len(self.parent) - len(kept)

    def refresh(self) -> None:
        evictable = self.evictable()
        for block in self.parent:
            if block in evictable:
                self.policy.offer(block)
            else:
                self.policy.withhold(block)

    def evict(self, num_blocks: int) -> list[BlockHash] | None:
        gone: list[BlockHash] = []

        def uncovers(victim: BlockHash) -> BlockHash | None:
            assert victim not in gone, "chosen twice"
            assert victim not in self.pinned, "a pinned block was chosen"
            assert not [c for c in self.children(victim) if c not in gone], "head before tail"
            gone.append(victim)
            parent = self.parent[victim]
            if parent is None or parent in self.pinned:
                return None
            return None if [c for c in self.children(parent) if c not in gone] else parent

        victims = self.policy.evict(num_blocks, uncovers, self.now)
        if victims is not None:
            assert victims == gone
            for victim in victims:
                del self.parent[victim]
        assert self.policy.num_candidates() == len(self.evictable())
        return victims


@pytest.fixture
def forest_of() -> type[Forest]:
    return Forest


@pytest.fixture
def key() -> object:
    return block_key
