"""Blocks of the pool and the arithmetic of their slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from workers.core.ids import BlockHash
from workers.core.messages import SlotRef

if TYPE_CHECKING:
    from workers.core.owners import Owner

SLOT_HEADER_BYTES: Final = 64
SLOT_ALIGN_BYTES: Final = 4096


def num_full_blocks(num_tokens: int, block_tokens: int) -> int:
    """Blocks that have a key: the partly filled last one has none."""
    return num_tokens // block_tokens


def slot_bytes_of(block_bytes: int, header_bytes: int = SLOT_HEADER_BYTES) -> int:
    """Header and payload of one block, rounded up to whole memory pages."""
    return -(-(header_bytes + block_bytes) // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


class BlockState(StrEnum):
    """pending -> written -> stored -> withdrawn, or withdrawn from anywhere."""

    PENDING = "pending"  # a writer fills the slot
    WRITTEN = "written"  # bytes in place, an ancestor is still pending
    STORED = "stored"  # readable
    WITHDRAWN = "withdrawn"  # out of the index; the slot waits for its writer or readers


@dataclass(slots=True, eq=False)
class Block:
    """One block in one slot. `client` and `owner` write it while it is pending."""

    key: BlockHash
    namespace: bytes
    slot: int
    generation: int
    parent: Block | None
    client: int
    owner: Owner
    worker: str  # who computed it
    state: BlockState = BlockState.PENDING
    writing: bool = True
    checksum: int = 0
    offered: bool = False  # a candidate for eviction
    children: dict[BlockHash, Block] = field(default_factory=dict)
    pins: set[Owner] = field(default_factory=set)

    @property
    def ref(self) -> SlotRef:
        return SlotRef(self.slot, self.generation)

    @property
    def evictable(self) -> bool:
        return self.state is BlockState.STORED and not self.pins and not self.children

    @property
    def slot_idle(self) -> bool:
        """Nobody reads or writes the slot, nobody can find it."""
        return self.state is BlockState.WITHDRAWN and not self.writing and not self.pins
