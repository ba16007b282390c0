"""Slots whose payloads lie in memory that is known by its address only, a GPU's for instance.

    direct:  device ──writes──▶ region ──copy──▶ mirror: verified there
    staged:  device ──writes──▶ mirror: verified there ──copy──▶ region

Each slot has a twin in host memory, the mirror. It holds the headers and is what is verified, since a
checksum cannot be taken over memory that the CPU does not reach. Where the device cannot register the
region, the mirror is what it registers: pinned staging, with the same bytes in the end.

Such memory is for blocks that come in: peers cannot read it, because headers lie elsewhere.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

from workers.core.transfer_handshake import SlabFacts
from workers.pool.arena import Slab
from workers.transfer.base import Region, SlotMemory


class Copier(Protocol):
    """Moves bytes between a region's memory and the host's. Both wait until it is done."""

    def to_host(self, address: int, target: memoryview) -> None: ...
    def from_host(self, address: int, source: memoryview) -> None: ...


class HostCopier:
    """Of memory that the CPU reaches by the same address."""

    def to_host(self, address: int, target: memoryview) -> None:
        ctypes.memmove(_address_of(target), address, len(target))

    def from_host(self, address: int, source: memoryview) -> None:
        ctypes.memmove(address, _address_of(source), len(source))


class RegionMemory(SlotMemory):
    """Slot i's payload is `payload_bytes` of the region from `i * payload_bytes` on.

    `facts` are what peers compare: slots of a slab with that payload. `close` frees the mirror.
    """

    copies = True

    def __init__(
        self, region: Region, facts: SlabFacts, copier: Copier, incarnation: int = 0
    ) -> None:
        payload_bytes = facts.slot_bytes - facts.header_bytes
        if region.num_bytes < facts.num_slots * payload_bytes:
            raise ValueError(
                f"a region of {region.num_bytes} bytes holds no {facts.num_slots} payloads of "
                f"{payload_bytes}"
            )
        mirror = mmap.mmap(-1, facts.num_slots * facts.slot_bytes)
        super().__init__(Slab(mirror, facts.slot_bytes, facts.header_bytes), facts, incarnation)
        self.kind = region.kind
        self.staged_because = ""
        self._region = region
        self._copier = copier

    @property
    def region(self) -> Region:
        return super().region if self.staged_because else self._region

    def payload_address(self, slot: int) -> int:
        if self.staged_because:
            return super().payload_address(slot)
        return self._payload(slot, 0)

    def stage(self, reason: str) -> bool:
        if self.staged_because:
            return False
        self.staged_because = reason
        return True

    def arrived(self, slot: int, offset: int, length: int) -> None:
        if not self.staged_because:
            self._copier.to_host(self._payload(slot, offset), self.range(slot, offset, length))

    def verified(self, slot: int, offset: int, length: int) -> None:
        if self.staged_because:
            self._copier.from_host(self._payload(slot, offset), self.range(slot, offset, length))

    def close(self) -> None:
        self.slab.close()

    def _payload(self, slot: int, offset: int) -> int:
        return self._region.address + slot * self.payload_bytes + offset


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
