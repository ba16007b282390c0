"""Free slots and their generations."""

from __future__ import annotations

from collections import deque


class SlotTable:
    """Hands out slots of a slab. Each handing-out raises the slot's generation.

    Freed slots come back first in, first out, so that one rests as long as it can before it is
    written again; slots never used come last, when the slab's pages have been touched.
    `first_generation` should differ between incarnations: then what a client kept from a former
    life of the agent matches nothing.
    """

    def __init__(self, num_slots: int, first_generation: int = 1) -> None:
        self.num_slots = num_slots
        self._first_generation = first_generation
        self._generations: list[int] = []  # of the slots that were handed out at least once
        self._freed: deque[int] = deque()

    @property
    def num_free(self) -> int:
        return len(self._freed) + self.num_slots - len(self._generations)

    def shrink(self, num_slots: int) -> None:
        """Never hand out a slot from `num_slots` on; those that were once stay in use."""
        self.num_slots = min(self.num_slots, max(num_slots, len(self._generations)))

    def take(self) -> tuple[int, int] | None:
        """(slot, generation), or None when no slot is free."""
        if self._freed:
            slot = self._freed.popleft()
            self._generations[slot] += 1
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
