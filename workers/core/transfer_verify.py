"""Does a slot hold what was asked for? Pure."""

from __future__ import annotations

from typing import NamedTuple

from workers.core.transfer_types import Cause


class Wanted(NamedTuple):
    """A range of one block in one slot, at one generation."""

    slot: int
    generation: int
    key: bytes
    block_length: int
    offset: int
    length: int


class Found(NamedTuple):
    """What the slot's header says; None stands for a slot without a whole block."""

    generation: int
    key: bytes
    length: int
    checksum: int


def in_bounds(wanted: Wanted, num_slots: int, payload_bytes: int) -> bool:
    """The slab has that slot and it can hold that block and range."""
    return (
        0 <= wanted.slot < num_slots
        and wanted.offset >= 0
        and wanted.length > 0
        and wanted.offset + wanted.length <= wanted.block_length <= payload_bytes
    )


def judge_source(wanted: Wanted, found: Found | None) -> Cause | None:
    """None: the slot holds the block that was asked for."""
    if found is None or (found.generation, found.key) != (wanted.generation, wanted.key):
        return Cause.STALE
    return None if found.length == wanted.block_length else Cause.BOUNDS
