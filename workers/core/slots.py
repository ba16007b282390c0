"""Free slots and their generations."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


class SlotTable:
    """Hands out slots of a slab or file. Each handing-out raises the slot's generation.

    Freed slots come back first in, first out, so that one rests as long as it can before it is
    written again; slots never used come last, when the slab's pages have been touched.
    `first_generation` should differ between incarnations, and grow: then what a client kept from a
    former life of the agent matches nothing. `used` are slots (with their generations) that are in
    use from the start.
    """

    def __init__(
        self, num_slots: int, first_generation: int = 1, used: Mapping[int, int] | None = None
    ) -> None:
        self.num_slots = num_slots
        self._first_generation = first_generation
        known = max(used) + 1 if used else 0
        unused = first_generation - 1
        # Of the slots below the highest one that was ever handed out:
        self._generations = [(used or {}).get(slot, unused) for slot in range(known)]
        self._freed = deque(slot for slot in range(known) if slot not in (used or {}))

    @property
    def num_free(self) -> int:
        return len(self._freed) + self.num_slots - len(self._generations)

    @property
    def num_used(self) -> int:
        return self.num_slots - self.num_free

    def shrink(self, num_slots: int) -> None:
        """Never hand out a slot from `num_slots` on; those that were once stay in use."""
        self.num_slots = min(self.num_slots, max(num_slots, len(self._generations)))

    def grow(self, num_slots: int) -> None:
        """There are more slots by now."""
        self.num_slots = max(self.num_slots, num_slots)

    def take(self) -> tuple[int, int] | None:
        """(slot, generation), or None when no slot is free."""
        if self._freed:
            slot = self._freed.popleft()
            self._generations[slot] = max(self._generations[slot] + 1, self._first_generation)
            return slot, self._generations[slot]
        slot = len(self._generations)
        if slot == self.num_slots:
            return None
        self._generations.append(self._first_generation)
        return slot, self._first_generation

    def give_back(self, slot: int) -> None:
        self._freed.append(slot)

    def free_slots(self) -> set[int]:
        """For integrity checks."""
        free = set(self._freed) | set(range(len(self._generations), self.num_slots))
        assert len(free) == self.num_free, "a slot is free twice"
        return free
