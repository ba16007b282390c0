"""Slots of a pool that hold no block for a while: lent to the doctor's probes.

They lie in quarantine, as slots do that a former agent's writer may still fill: in no index, in no
policy, and free again by themselves when their time is over.
"""

from __future__ import annotations

from typing import Final

from workers.core.messages import SlotRef
from workers.core.pool_state import PoolState

SCRATCH_SHARE: Final = 64
"""At most one slot of so many, and always one, is lent at a time."""


def take_scratch(pool: PoolState, num_slots: int, until: float, lent: int = 0) -> list[SlotRef]:
    """Up to so many slots, until then; fewer where `lent` ones are out or there is no room.

    Evicts for them where none is free. `until`: seconds, as the pool's `now`.
    """
    most = max(1, pool.slots.num_slots // SCRATCH_SHARE) - lent
    wanted = min(num_slots, most)
    room = pool._make_room(wanted) if wanted > 0 else 0
    taken: list[SlotRef] = []
    for _ in range(room):
        slot = pool.slots.take()
        if slot is None:
            break
        pool.quarantined[slot[0]] = until
        pool.changed_slots.add(slot[0])
        taken.append(SlotRef(*slot))
    return taken


def end_scratch(pool: PoolState, slots: list[SlotRef], now: float) -> None:
    """Nobody uses these any more, before their time was over: `expire` frees them."""
    for ref in slots:
        if ref.slot in pool.quarantined:
            pool.quarantined[ref.slot] = now
