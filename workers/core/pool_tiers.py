"""How blocks move between memory and disk.

Demotion is passive: when free slots run short, the policy's next victims are *leaving*; each stays
readable until its copy is on disk, then gives its slot up. Used meanwhile, it stays, and has a copy
for the next time. Promotion gives a block on disk a slot again and keeps the copy, which goes first
when the disk needs room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from workers.core.blocks import Block, BlockState
from workers.core.ids import BlockHash
from workers.core.policies.base import BlockUse, Victim
from workers.core.pool_base import PoolBase
from workers.core.tiers import MAX_READS, MAX_WRITES, Outcome, Urgency, WriteOut

MAX_RESERVE: Final = 256
SMALL_RESERVE: Final = 8
"""Slots that a pool keeps free at least, up to a quarter of it: a share of few is none."""
DEMAND_FADES: Final = 15 / 16


class TieredPool(PoolBase):
    """Adds the second tier. Everything works without one: `disk` is closed then."""

    @property
    def capacity_blocks(self) -> int:
        """Of both tiers together."""
        cap, num_slots = self.disk.cap_blocks, self.disk.slots.num_slots
        on_disk = num_slots if cap is None else min(num_slots, cap)
        return self.slots.num_slots + on_disk

    # --- out of memory ----------------------------------------------------------------------

    @property
    def reserve(self) -> int:
        """Free slots to keep ahead of stores: a share of the pool, or what lately came at once if
        that is more. What a store needs beyond it leaves without a copy."""
        num_slots = self.slots.num_slots
        share = int(num_slots * self.limits.reserve_share)
        least = min(SMALL_RESERVE, num_slots // 4)
        lately = min(int(self._demand), num_slots // 2)
        return max(1, min(max(share, least, lately), MAX_RESERVE))

    def _note_demand(self, num_new: int) -> None:
        """A store brings so many new blocks; what was asked before counts less and less."""
        self._demand = max(float(num_new), self._demand * DEMAND_FADES)

    def demote_ahead(self, now: float) -> int:
        """Let blocks leave until the reserve is there, or on its way; how many more do.

        Called after every change: where nothing may leave, that is no attempt to evict.
        """
        self.now = max(self.now, now)
        disk = self.disk
        needed = self.reserve + disk.num_wanted
        missing = needed - self.slots.num_free - len(disk.leaving)
        wanted = min(missing, MAX_WRITES - disk.num_writes)
        if wanted <= 0 or not disk.takes_writes or not self.policy.num_candidates():
            return 0
        room = self._make_disk_room(wanted)
        if not room:
            return 0
        victims = self.policy.evict(room, self._uncovers(), self.now, some=True)
        self.counters.count_eviction(room, len(victims))
        for victim in victims:
            self._start_leaving(self.blocks[victim.key], use_of(victim))
        return len(victims)

    def _start_leaving(self, block: Block, use: BlockUse) -> None:
        block.offered = False
        block.leaving = True
        self.disk.leaving[block] = use
        self.disk.duplicates.pop(block, None)  # this copy is needed now
        if block.parent is not None:
            block.parent.num_near -= 1
            block.parent.num_leaving += 1
            self._refresh(block.parent)
        if block.disk is None:
            self.disk.start_write(block, self.block_bytes)
        self._leave_if_ready(block)

    def _drop_from_memory(self, victim: Victim) -> bool:
        """A victim that has a copy already leaves at once; whether it had."""
        block = self.blocks[victim.key]
        if block.disk is None or not block.disk.ready or block.num_leaving:
            return False
        if block.parent is not None:
            block.parent.num_near -= 1
        self._to_disk(block, use_of(victim))
        if block.parent is not None:
            self._refresh(block.parent)
        return True

    def _uncovers(self) -> Callable[[BlockHash], BlockHash | None]:
        """Which parent has no near child left once these victims go?"""
        gone: Counter[BlockHash] = Counter()

        def uncovers(victim: BlockHash) -> BlockHash | None:
            parent = self.blocks[victim].parent
            if parent is None:
                return None
            gone[parent.key] += 1
            kept = parent.pins or parent.keeps or parent.leaving
            stored = parent.state is BlockState.STORED
            return (
                parent.key if stored and not kept and parent.num_near == gone[parent.key] else None
            )

        return uncovers

    # --- into memory ------------------------------------------------------------------------

    def _want(self, chain: Iterable[Block], urgency: Urgency) -> None:
        """Have what of this chain lies on disk only read as slots come free, head first.

        The chain must be pinned, and come with all its ancestors that are on disk. Nothing that
        has no copy yet leaves for it, as long as copies can be made.
        """
        for block in chain:
            if block.state is BlockState.ON_DISK and not self.disk.want(block, urgency):
                break
        if not self.disk.takes_writes:
            self._make_room(min(self.disk.num_wanted, MAX_READS - self.disk.num_reads))
        self.serve_wanted()

    def serve_wanted(self) -> int:
        """Begin to read what is wanted, as far as slots are free; how many blocks."""
        num_begun = 0
        while self.slots.num_free and self.disk.num_reads < MAX_READS:
            found = self.disk.next_wanted()
            if found is None:
                break
            block, urgency = found
            self.disk.unwant(block)
            has_parent = block.parent is None or block.parent.near
            if block.state is BlockState.ON_DISK and block.pins and has_parent:
                self._begin_promotion(block, urgency)
                num_begun += 1
        return num_begun

    def _promote_now(self, chain: Iterable[Block], urgency: Urgency) -> None:
        """As `_want`, at once, whatever must leave for it."""
        wanted = [block for block in chain if block.state is BlockState.ON_DISK]
        room = self._make_room(min(len(wanted), MAX_READS - self.disk.num_reads))
        for block in wanted[:room]:
            self.disk.unwant(block)
            self._begin_promotion(block, urgency)

    def _begin_promotion(self, block: Block, urgency: Urgency) -> None:
        taken = self.slots.take()
        assert taken is not None, "room was made before"
        block.slot, block.generation = taken
        block.state = BlockState.PROMOTING
        self.by_slot[block.slot] = block
        self.changed_slots.add(block.slot)
        if block.parent is not None:
            block.parent.num_near += 1
            self._refresh(block.parent)
        self.disk.start_read(block, self.block_bytes, urgency, self.now)

    def _make_room(self, num_wanted: int) -> int:
        raise NotImplementedError

    # --- what the shell reports -------------------------------------------------------------

    def disk_done(self, outcome: Outcome, now: float) -> None:
        """A job ended. One that nobody started is ignored."""
        self.now = max(self.now, now)
        found = self.disk.end(outcome)
        if found is None:
            return
        job, block = found
        if block.state is BlockState.WITHDRAWN:
            self.disk.free(block)  # though a reader may still be at the slot in memory
            self._free_if_idle(block)
        elif isinstance(job, WriteOut):
            self._written_out(block, outcome)
        else:
            self._read_in(block, outcome)

    def _written_out(self, block: Block, outcome: Outcome) -> None:
        assert block.disk is not None, "a write has a place"
        if not outcome.problem:
            block.disk.ready = True
            if block.leaving:
                self._leave_if_ready(block)
            else:
                self.disk.duplicates[block] = None
            return
        if outcome.problem == "source":
            self.counters.corrupt_total += 1
            self._withdraw(block, "corrupt")
            return
        self.disk.free(block)
        if block.leaving:
            self._stay(block)

    def _read_in(self, block: Block, outcome: Outcome) -> None:
        if outcome.problem:
            self.counters.corrupt_total += 1
            self._withdraw(block, "tier_lost" if outcome.problem == "io" else "corrupt")
            return
        block.state = BlockState.PROMOTED
        self.counters.promoted_blocks_total += 1
        self._publish(block, self.now)

    # --- room on disk -----------------------------------------------------------------------

    def _make_disk_room(self, num_wanted: int) -> int:
        """Free disk slots for up to `num_wanted` blocks; for how many."""
        disk = self.disk
        while disk.num_free < num_wanted and disk.drop_duplicate():
            pass
        missing = num_wanted - disk.num_free
        if missing > 0 and disk.evictor.num_candidates():
            self._evict_from_disk(missing)
        return min(num_wanted, disk.num_free)

    def _evict_from_disk(self, num_blocks: int) -> int:
        """Let blocks that lie on disk only leave the pool, to make room there; how many."""
        victims = self.disk.evictor.evict(num_blocks, self._uncovers_on_disk(), self.now, some=True)
        self.counters.count_eviction(num_blocks, len(victims))
        for victim in victims:
            self._withdraw(self.blocks[victim.key], "ssd_capacity", noted=True)
        self.disk.counters.evicted_blocks_total += len(victims)
        self.history.note(victims, self.now, "ssd_capacity", "ssd")
        return len(victims)

    def _uncovers_on_disk(self) -> Callable[[BlockHash], BlockHash | None]:
        gone: Counter[BlockHash] = Counter()

        def uncovers(victim: BlockHash) -> BlockHash | None:
            parent = self.blocks[victim].parent
            if parent is None or parent.state is not BlockState.ON_DISK:
                return None
            gone[parent.key] += 1
            free = not parent.pins and not parent.keeps
            return parent.key if free and len(parent.children) == gone[parent.key] else None

        return uncovers

    def trim_disk(self, now: float, most: int = 256) -> int:
        """Take a lowered cap in, a bounded number of blocks at a time; how many left."""
        self.now = max(self.now, now)
        num_left = 0
        while num_left < most and self.disk.num_over_cap and self.disk.drop_duplicate():
            num_left += 1
        over = min(most - num_left, self.disk.num_over_cap)
        return num_left + (self._evict_from_disk(over) if over > 0 else 0)


def use_of(victim: Victim) -> BlockUse:
    return BlockUse(victim.key, victim.last_use, victim.uses, False)
