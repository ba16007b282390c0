"""Blocks of the pool and the arithmetic of their slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from workers.core.ids import BlockHash
from workers.core.messages import SlotRef

if TYPE_CHECKING:
    from workers.core.owners import Owner
    from workers.core.quotas import Group

SLOT_HEADER_BYTES: Final = 64
SLOT_ALIGN_BYTES: Final = 4096


def num_full_blocks(num_tokens: int, block_tokens: int) -> int:
    """Blocks that have a key: the partly filled last one has none."""
    return num_tokens // block_tokens


def slot_bytes_of(block_bytes: int, header_bytes: int = SLOT_HEADER_BYTES) -> int:
    """Header and payload of one block, rounded up to whole memory pages."""
    return -(-(header_bytes + block_bytes) // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


class BlockState(StrEnum):
    """pending -> written -> stored <-> on_disk (by way of promoting -> promoted), or withdrawn
    from anywhere."""

    PENDING = "pending"  # a writer fills the slot
    WRITTEN = "written"  # bytes in place, an ancestor is still pending
    STORED = "stored"  # readable
    ON_DISK = "on_disk"  # has no slot; to be had from the disk copy
    PROMOTING = "promoting"  # a slot is being filled from the disk copy
    PROMOTED = "promoted"  # bytes back in place, an ancestor is still being promoted
    WITHDRAWN = "withdrawn"  # out of the index; the slot waits for its writer or readers


HELD_STATES: Final = frozenset(
    {BlockState.STORED, BlockState.ON_DISK, BlockState.PROMOTING, BlockState.PROMOTED}
)
NO_SLOT: Final = -1


@dataclass(slots=True, eq=False)
class DiskCopy:
    """A block's place on SSD. Not `ready`: the copy is being written."""

    slot: int
    generation: int
    ready: bool = False


@dataclass(slots=True, eq=False)
class Block:
    """One block of the pool. `client` and `owner` write it while it is pending.

    A child is *near* while it is in memory or on its way there, and *leaving* while it is still
    in memory but chosen to go: a copy is being made, or its own children leave first.
    """

    key: BlockHash
    namespace: bytes
    slot: int
    generation: int
    parent: Block | None
    client: int
    owner: Owner | None
    worker: str  # who computed it
    tenant: str = ""
    groups: tuple[Group, ...] = ()  # its tenant and its namespace
    state: BlockState = BlockState.PENDING
    writing: bool = True
    checksum: int = 0
    offered: bool = False  # a candidate for eviction in the tier it is to be had from
    children: dict[BlockHash, Block] = field(default_factory=dict)
    pins: set[Owner] = field(default_factory=set)
    disk: DiskCopy | None = None
    copying: bool = False  # the disk is reading or writing the slot
    leaving: bool = False
    depth: int = 1  # blocks from the chain's head to this one
    keeps: int = 0  # active sequences that end with this block
    num_near: int = 0  # children that are near and not leaving
    num_leaving: int = 0  # children that are leaving

    @property
    def ref(self) -> SlotRef:
        return SlotRef(self.slot, self.generation)

    @property
    def held(self) -> bool:
        """Readable, from memory or after a promotion."""
        return self.state in HELD_STATES

    @property
    def near(self) -> bool:
        return self.state is not BlockState.ON_DISK and self.state is not BlockState.WITHDRAWN

    @property
    def evictable(self) -> bool:
        """May leave the tier it is to be had from."""
        if self.pins or self.keeps or self.leaving:
            return False
        if self.state is BlockState.ON_DISK:
            return not self.children
        return self.state is BlockState.STORED and not self.num_near

    @property
    def slot_idle(self) -> bool:
        """Nobody reads or writes the slot, nobody can find it."""
        withdrawn = self.state is BlockState.WITHDRAWN
        return withdrawn and not self.writing and not self.pins and not self.copying
