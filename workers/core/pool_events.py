"""Collects the pool's KV events between two readings, joining neighbours into runs."""

from __future__ import annotations

from workers.core.blocks import Block, BlockState
from workers.core.ids import BlockHash
from workers.core.messages import (
    AllBlocksCleared,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    RemovalCause,
)
from workers.core.stats_messages import TierName


class EventNotes:
    """Events since the last `take`, in the order in which they happened."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def take(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    def stored(self, block: Block) -> None:
        parent, tier = parent_key(block), tier_of(block)
        last = self._events[-1] if self._events else None
        joins = isinstance(last, BlocksStored) and last.block_hashes[-1] == parent
        if joins and isinstance(last, BlocksStored) and last.tier == tier:
            last.block_hashes.append(block.key)
        else:
            self._events.append(BlocksStored(block.namespace, parent, [block.key], tier))

    def moved(self, block: Block) -> None:
        tier = tier_of(block)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksMoved) and (last.namespace, last.tier) == (block.namespace, tier):
            last.block_hashes.append(block.key)
        else:
            self._events.append(BlocksMoved(block.namespace, [block.key], tier))

    def removed(self, namespace: bytes, keys: list[BlockHash], cause: RemovalCause) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and (last.namespace, last.cause) == (namespace, cause):
            last.block_hashes.extend(keys)
        else:
            self._events.append(BlocksRemoved(namespace, list(keys), cause))

    def cleared(self, namespace: bytes) -> None:
        self._events.append(AllBlocksCleared(namespace))


def parent_key(block: Block) -> bytes:
    """b"" at a chain's head, as on the wire."""
    return b"" if block.parent is None else bytes(block.parent.key)


def tier_of(block: Block) -> TierName:
    """From where a held block is to be had."""
    return "dram" if block.state is BlockState.STORED else "ssd"
