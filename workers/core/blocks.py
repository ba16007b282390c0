"""Arithmetic of blocks and slots."""

from typing import Final

SLOT_HEADER_BYTES: Final = 64
SLOT_ALIGN_BYTES: Final = 4096


def num_full_blocks(num_tokens: int, block_tokens: int) -> int:
    """Blocks that have a key: the partly filled last one has none."""
    return num_tokens // block_tokens


def slot_bytes_of(block_bytes: int, header_bytes: int = SLOT_HEADER_BYTES) -> int:
    """Header and payload of one block, rounded up to whole memory pages."""
    return -(-(header_bytes + block_bytes) // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
