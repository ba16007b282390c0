"""The slab of one agent incarnation, as the connector uses it: payloads as tensors."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from workers.core.messages import SlotRef, Welcome
from workers.pool.arena import Slab, checksum_of

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

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def holds(self, slot: int) -> bool:
        return 0 <= slot < self._slab.num_slots

    def payload(self, slot: int) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.frombuffer(self._slab.payload(slot, self._block_bytes), dtype=torch.uint8)

    def generation(self, slot: int) -> int:
        """0 where nothing whole is there."""
        header = self._slab.read_header(slot)
        return header.generation if header is not None else 0

    def verify(self, slot: int, generation: int, block_hash: bytes) -> Cause | None:
        """None where the slot still holds this block whole, with the writer's checksum."""
        header = self._slab.read_header(slot)
        if header is None or (header.generation, header.key) != (generation, block_hash):
            return "generation"
        if header.length != self._block_bytes:
            return "io"
        if checksum_of(self._slab.payload(slot, self._block_bytes)) != header.checksum:
            return "checksum"
        return None if self._slab.read_header(slot) == header else "generation"

    def begin_write(self, slot: int) -> torch.Tensor:
        """Make the slot unreadable and give its payload to fill."""
        self._slab.begin_write(slot)
        return self.payload(slot)

    def seal(self, ref: SlotRef, block_hash: bytes) -> int:
        """Declare the payload whole; its checksum."""
        checksum = checksum_of(self._slab.payload(ref.slot, self._block_bytes))
        self._slab.write_header(ref.slot, ref.generation, self._block_bytes, checksum, block_hash)
        return checksum
