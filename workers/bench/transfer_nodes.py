"""Slabs of the two nodes that `perilune bench transfer` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from workers.core.blocks import SLOT_HEADER_BYTES, slot_bytes_of
from workers.core.transfer_handshake import SlabFacts
from workers.pool.arena import Slab
from workers.transfer.base import SlotMemory

SECRET: Final = bytes(range(32))
INCARNATION: Final = 1


def key_of(index: int) -> bytes:
    return b"bench" + index.to_bytes(11, "little")


def facts_of(block_bytes: int, num_blocks: int) -> SlabFacts:
    return SlabFacts(slot_bytes_of(block_bytes), SLOT_HEADER_BYTES, num_blocks)


def open_memory(
    path: str | Path, block_bytes: int, num_blocks: int, incarnation: int
) -> SlotMemory:
    facts = facts_of(block_bytes, num_blocks)
    return SlotMemory(Slab.attach(path, facts.slot_bytes), facts, incarnation)
