"""Slots that a node has set aside for blocks that a peer pushes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_RESERVED: Final = 65_536
OnLanded = Callable[[int, int, int], None]
"""Slot, generation, checksum."""


@dataclass(slots=True)
class _Slot:
    generation: int
    key: bytes
    length: int
    writing: bool = False


class ReservedSlots:
    """A `PushTarget`. Thread-safe.

    `on_landed(slot, generation, checksum)` is called from a server's thread, outside of the lock.
    A slot that is being written stays with its writer until it landed or was lost: `withdraw` then
    says False, and the slot must not be used for anything else yet.
    """

    def __init__(self, on_landed: OnLanded) -> None:
        self._on_landed = on_landed
        self._slots: dict[int, _Slot] = {}
        self._lock = threading.Lock()

    def reserve(self, slot: int, generation: int, key: bytes, length: int) -> None:
        """Let a peer fill this slot with this block, once. ValueError: it is reserved already."""
        with self._lock:
            if slot in self._slots or len(self._slots) >= MAX_RESERVED:
                raise ValueError(f"slot {slot}: reserved, or {MAX_RESERVED} others are")
            self._slots[slot] = _Slot(generation, key, length)

    def withdraw(self, slot: int) -> bool:
        """Take a reservation back. False: its bytes are being written; ask again."""
        with self._lock:
            found = self._slots.get(slot)
            if found is not None and found.writing:
                return False
            self._slots.pop(slot, None)
            return True

    def claim(self, slot: int, generation: int, key: bytes, length: int) -> bool:
        with self._lock:
            found = self._slots.get(slot)
            if found is None or found.writing:
                return False
            if (found.generation, found.key, found.length) != (generation, key, length):
                return False
            found.writing = True
            return True

    def landed(self, slot: int, generation: int, checksum: int) -> None:
        with self._lock:
            self._slots.pop(slot, None)
        self._on_landed(slot, generation, checksum)

    def lost(self, slot: int, generation: int) -> None:
        with self._lock:
            found = self._slots.get(slot)
            if found is not None and found.generation == generation:
                found.writing = False


class NoSlots:
    """A `PushTarget` that takes nothing."""

    def claim(self, slot: int, generation: int, key: bytes, length: int) -> bool:
        return False

    def landed(self, slot: int, generation: int, checksum: int) -> None:
        raise AssertionError("nothing was claimed")

    def lost(self, slot: int, generation: int) -> None:
        raise AssertionError("nothing was claimed")
