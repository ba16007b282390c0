"""The slab of one agent incarnation, as the connector uses it: payloads as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import xxhash

from workers.core.messages import SlotRef, Welcome
from workers.pool.arena import Slab, checksum_of
from workers.pool.prefault import PageMapper

Cause = Literal["generation", "checksum", "io"]


class SlabSlots:
    """Thread-safe: slots are independent, and the slab itself never changes.

    Tensors that `payload` gave out keep the mapping alive, so that a new incarnation's slab can
    take this one's place while a copy is under way.
    """

    def __init__(self, welcome: Welcome, block_bytes: int) -> None:
        """Map the slab that the agent named. OSError: it is not there."""
        self._slab = Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)
        self._incarnation = welcome.incarnation
        self._block_bytes = block_bytes
        # All of the slab from its first payload on, made once: to slice it costs a microsecond, to
        # make a tensor ten.
        slab = self._slab
        everything = slab.payload(0, slab.num_slots * slab.slot_bytes - slab.header_bytes)
        self._bytes = torch.frombuffer(everything, dtype=torch.uint8)

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def map_ahead(self, settle: Callable[[], None] = lambda: None) -> PageMapper:
        """Have the slab's pages mapped here as the agent makes them, in a thread that `settle` prepares:
        the first copy into or out of a slot costs several times as much without it. Close it."""
        mapper = PageMapper(self._slab.everything, settle)
        mapper.start()
        return mapper

    def holds(self, slot: int) -> bool:
        return 0 <= slot < self._slab.num_slots

    def payload(self, slot: int) -> torch.Tensor:
        start = slot * self._slab.slot_bytes
        return self._bytes[start : start + self._block_bytes]

    def generation(self, slot: int) -> int:
        """0 where nothing whole is there."""
        header = self._slab.read_header(slot)
        return header.generation if header is not None else 0

    def check(self, slot: int) -> PayloadCheck:
        """To follow a copy, part by part."""
        return PayloadCheck(self._slab, slot, self._block_bytes)

    def begin_write(self, slot: int) -> torch.Tensor:
        """Make the slot unreadable and give its payload to fill."""
        self._slab.begin_write(slot)
        return self.payload(slot)

    def seal(self, ref: SlotRef, block_hash: bytes) -> int:
        """Declare the payload whole; its checksum."""
        checksum = checksum_of(self._slab.payload(ref.slot, self._block_bytes))
        self._slab.write_header(ref.slot, ref.generation, self._block_bytes, checksum, block_hash)
        return checksum


class PayloadCheck:
    """Follows the copy of one payload with its checksum, while the bytes are still in the cache."""

    def __init__(self, slab: Slab, slot: int, block_bytes: int) -> None:
        self._slab = slab
        self._slot = slot
        self._block_bytes = block_bytes
        self._view = slab.payload(slot, block_bytes)
        self._before = slab.read_header(slot)
        self._sum: xxhash.xxh3_64 | None = None
        self._digest: int | None = None

    def copied(self, start: int, end: int) -> None:
        """These bytes were copied just now; parts come in order."""
        if (start, end) == (0, self._block_bytes):
            self._digest = checksum_of(self._view)
            return
        if self._sum is None:
            self._sum = xxhash.xxh3_64()
        self._sum.update(self._view[start:end])

    def verify(self, generation: int, block_hash: bytes) -> Cause | None:
        """None where what was copied is this block whole, with the checksum of its writer."""
        header = self._before
        if header is None or (header.generation, header.key) != (generation, block_hash):
            return "generation"
        if header.length != self._block_bytes:
            return "io"
        digest = self._digest if self._sum is None else self._sum.intdigest()
        if self._slab.read_header(self._slot) != header:
            return "generation"
        return None if digest == header.checksum else "checksum"
