"""What a pool consists of, and the elementary changes: each leaves the invariants in place.

    free -> pending -> written -> stored -> free      written: waits for an ancestor to be stored
               any of them -> withdrawn -> free       withdrawn: until its writer and readers left

What is held is prefix-closed, and so is what of it lies in memory: a block becomes readable after
its parent, only blocks without near children leave memory, only childless ones leave the disk, and
whatever else removes a block withdraws its descendants with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from workers.core.blocks import NO_SLOT, Block, BlockState
from workers.core.eviction_history import EvictionHistory
from workers.core.ids import BlockHash, OwnerId, request_of
from workers.core.messages import RemovalCause
from workers.core.owners import Owner, OwnerTable
from workers.core.policies.base import BlockUse, EvictionPolicy, Victim
from workers.core.pool_counters import PoolCounters
from workers.core.pool_events import EventNotes
from workers.core.pool_evictor import TierEvictor
from workers.core.quotas import NO_QUOTA, Cell, Groups
from workers.core.slots import SlotTable
from workers.core.stats_messages import TierName
from workers.core.tiers import DiskState
from workers.core.whatif import WhatIf

_WAITING: Final = frozenset({BlockState.WRITTEN, BlockState.PROMOTED})


@dataclass(frozen=True, slots=True)
class ClientRef:
    """Who speaks: a connection's number and, for workers, the worker's id."""

    connection: int
    worker: str = ""


@dataclass(frozen=True, slots=True)
class StoreKind:
    """What the blocks of one store have in common."""

    namespace: bytes
    tenant: str


@dataclass(slots=True)
class PoolLimits:
    """Live settings. `write_queue_blocks` bounds the blocks being written at one time.

    The newest `pin_active_blocks` of each active sequence are kept from eviction, and by them what
    is above them, together at most `pin_active_share` of the pool. `reserve_share` of the slots is
    kept free by demoting ahead; a small pool keeps more.
    """

    lease_seconds: float = 30.0
    write_queue_blocks: int = 500
    pin_active_share: float = 0.0
    pin_active_blocks: int = 8
    reserve_share: float = 1 / 16


class PoolBase:
    """State of a pool of `num_slots` equal slots. Not thread-safe; no call blocks."""

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        limits: PoolLimits,
        *,
        block_bytes: int = 0,
        first_generation: int = 1,
    ) -> None:
        self.limits = limits
        self.counters = PoolCounters()
        self.block_bytes = block_bytes
        self.now = 0.0  # of the last call
        self.first_generation = first_generation
        self.slots = SlotTable(num_slots, first_generation)
        self.policy = TierEvictor(policy, self._cell_of)
        self.disk = DiskState(TierEvictor(policy.sibling(), self._cell_of))
        self.groups = Groups()
        self.blocks: dict[BlockHash, Block] = {}  # all but the withdrawn; parents before children
        self.by_slot: dict[int, Block] = {}
        self.owners = OwnerTable()
        self.writing: set[Block] = set()
        self.num_pinned = 0
        self.quarantined: dict[int, float] = {}  # slots that rest, until when
        self.history = EvictionHistory()
        self.whatif = WhatIf(num_slots)
        self.changed_slots: set[int] = set()  # since the shell last looked: for its journal
        self._demand = 0.0  # new blocks of the largest store of late
        self._events = EventNotes()

    # --- finding ----------------------------------------------------------------------------

    def _cell_of(self, key: BlockHash) -> Cell:
        if not self.groups.has_quotas:
            return NO_QUOTA
        block = self.blocks.get(key)
        return NO_QUOTA if block is None else self.groups.cell(block)

    def _find(self, namespace: bytes, key: bytes) -> Block | None:
        block = self.blocks.get(BlockHash(key))
        return block if block is not None and block.namespace == namespace else None

    def _is_stored(self, namespace: bytes, key: bytes) -> bool:
        block = self._find(namespace, key)
        return block is not None and block.state is BlockState.STORED

    def _is_held(self, namespace: bytes, key: bytes) -> bool:
        block = self._find(namespace, key)
        return block is not None and block.held

    def _present(self, namespace: bytes, block_hashes: Sequence[bytes]) -> list[Block]:
        """The blocks of the longest prefix that is here, in whatever state."""
        chain: list[Block] = []
        for key in block_hashes:
            block = self._find(namespace, key)
            if block is None or (chain and block.parent is not chain[-1]):
                break
            chain.append(block)
        return chain

    # --- pins -------------------------------------------------------------------------------

    def _open(self, client: ClientRef, owner_id: OwnerId, now: float) -> Owner:
        return self.owners.open(owner_id, client.connection, now + self.limits.lease_seconds)

    def _pin(self, block: Block, owner: Owner) -> None:
        if not block.pins:
            self.num_pinned += 1
        block.pins.add(owner)
        owner.pins.add(block)
        if block.leaving:
            self._stay(block)
        self._refresh(block)

    def _unpin(self, block: Block, owner: Owner) -> None:
        owner.pins.discard(block)
        if owner in block.pins:
            block.pins.remove(owner)
            if not block.pins:
                self.num_pinned -= 1
                self._refresh(block)
                self._free_if_idle(block)

    def _unpin_all(self, owner: Owner) -> int:
        pins = list(owner.pins)
        for block in pins:
            self._unpin(block, owner)
        self.owners.close_if_idle(owner)
        return len(pins)

    # --- being written ----------------------------------------------------------------------

    def _add(
        self, client: ClientRef, owner: Owner, parent: Block | None, key: BlockHash, like: StoreKind
    ) -> Block:
        """A new pending block in a slot of its own; there must be one free."""
        taken = self.slots.take()
        assert taken is not None, "room was made before"
        slot, generation = taken
        block = Block(
            key, like.namespace, slot, generation, parent, client.connection, owner, client.worker,
            tenant=like.tenant, groups=self.groups.of(like.tenant, like.namespace),
        )  # fmt: skip
        self.by_slot[slot] = block
        self.changed_slots.add(slot)
        owner.writes.add(block)
        self.writing.add(block)
        self._link(block)
        self._pin(block, owner)
        return block

    def _link(self, block: Block) -> None:
        """Enter a block into the index, below its parent."""
        self.blocks[block.key] = block
        self.groups.count(block, 1)
        parent = block.parent
        if parent is not None:
            block.depth = parent.depth + 1
            parent.children[block.key] = block
            parent.num_near += block.near
            self._refresh(parent)

    def _being_written(self, slot: int, generation: int) -> Block | None:
        block = self.by_slot.get(slot)
        if block is None or block.generation != generation or not block.writing:
            return None
        return block

    def _end_write(self, block: Block) -> None:
        owner = block.owner
        assert owner is not None, "who writes has an owner"
        block.writing = False
        self.writing.discard(block)
        owner.writes.discard(block)
        self.owners.close_if_idle(owner)
        self._free_if_idle(block)

    def _fail_write(self, block: Block) -> None:
        self.counters.store_failed_total += 1
        if block.state is BlockState.PENDING:
            self._withdraw(block, "failed_write")
        self._end_write(block)

    def _publish(self, block: Block, now: float) -> None:
        """Make a block whose bytes are in place readable, and its descendants likewise, if its
        parent is."""
        ready = [block]
        while ready:
            block = ready.pop()
            if block.parent is not None and block.parent.state is not BlockState.STORED:
                continue
            fresh = block.state is BlockState.WRITTEN
            block.state = BlockState.STORED
            self.changed_slots.add(block.slot)
            if fresh:
                self.counters.stored_blocks_total += 1
                self.policy.stored(block.key, now, _request_of(block))
                self._events.stored(block)
            else:
                # Not before: until its ancestors are here too, the block is to be had from disk.
                self.disk.duplicates[block] = None
                self.policy.adopt(self.disk.use_of_promoted(block, now), now)
                self._events.moved(block)
            self._refresh(block)
            if block.children:
                ready += [b for b in block.children.values() if b.state in _WAITING]

    # --- leaving ----------------------------------------------------------------------------

    def _withdraw(self, top: Block, cause: RemovalCause, *, noted: bool = False) -> int:
        """Take a block and its descendants out of the index; how many were held.

        `noted`: the history knows of `top` already.
        """
        parent = top.parent
        if parent is not None:
            del parent.children[top.key]
            parent.num_near -= top.near and not top.leaving
            parent.num_leaving -= top.leaving
            self._refresh(parent)
        held: list[BlockHash] = []
        subtree = [top]
        while subtree:
            block = subtree.pop()
            self.counters.evicted_by_cause[cause] += 1
            subtree += block.children.values()
            if block.held:
                held.append(block.key)
                if not noted or block is not top:
                    self._note_withdrawn(block, cause)
            if block.state is BlockState.STORED:
                self.policy.removed(block.key)
            else:
                if block.disk is not None:
                    self.disk.evictor.removed(block.key)
                self._drop_pins(block)
            self._forget(block)
        if held:
            self._events.removed(top.namespace, held, cause)
        if parent is not None and parent.leaving:
            self._leave_if_ready(parent)
        return len(held)

    def _note_withdrawn(self, block: Block, cause: RemovalCause) -> None:
        tier: TierName = "dram" if block.state is BlockState.STORED else "ssd"
        use = (self.policy if tier == "dram" else self.disk.evictor).use_of(block.key)
        last_use, uses = (self.now, 0) if use is None else (use.last_use, use.uses)
        self.history.note([Victim(block.key, 0.0, last_use, uses)], self.now, cause, tier)

    def _forget(self, block: Block) -> None:
        del self.blocks[block.key]
        self.groups.count(block, -1)
        if block.disk is not None:
            self.disk.forget(block)
        block.state = BlockState.WITHDRAWN
        block.children.clear()
        block.parent = None
        block.offered = block.leaving = False
        block.num_near = block.num_leaving = 0
        if block.slot != NO_SLOT:
            self.changed_slots.add(block.slot)
        self._free_if_idle(block)

    def _drop_pins(self, block: Block) -> None:
        """Nobody can be reading a block that is not readable."""
        for owner in list(block.pins):
            self._unpin(block, owner)
            self.owners.close_if_idle(owner)

    def _free_if_idle(self, block: Block) -> None:
        if not block.slot_idle:
            return
        if block.disk is not None:
            self.disk.free(block)
        if block.slot != NO_SLOT and self.by_slot.get(block.slot) is block:
            self._free_slot(block)

    def _free_slot(self, block: Block) -> None:
        del self.by_slot[block.slot]
        self.slots.give_back(block.slot)
        self.changed_slots.add(block.slot)

    def _refresh(self, block: Block) -> None:
        """Keep the candidates of the block's tier in step."""
        if block.evictable != block.offered:
            block.offered = not block.offered
            tier = self.disk.evictor if block.state is BlockState.ON_DISK else self.policy
            if block.offered:
                tier.offer(block.key)
            else:
                tier.withhold(block.key)

    def _stay(self, block: Block) -> None:
        """A leaving block is used after all: it and its ancestors are candidates as before."""
        line: Block | None = block
        while line is not None and line.leaving:
            line.leaving = False
            if line.disk is not None and line.disk.ready:
                self.disk.duplicates[line] = None
            if line.parent is not None:
                line.parent.num_leaving -= 1
                line.parent.num_near += 1
                self._refresh(line.parent)
            self.policy.adopt(self.disk.leaving.pop(line), self.now)
            self._refresh(line)
            line = line.parent

    def _leave_if_ready(self, block: Block) -> None:
        """A leaving block gives its slot up once its copy is whole and its children have left."""
        line: Block | None = block
        while line is not None and line.leaving and not line.num_near and not line.num_leaving:
            if line.disk is None or not line.disk.ready:
                return
            use = self.disk.leaving.pop(line)
            line.leaving = False
            if line.parent is not None:
                line.parent.num_leaving -= 1
            self.counters.evicted_from_memory_total += 1
            self._to_disk(line, use)
            line = line.parent

    def _to_disk(self, block: Block, use: BlockUse) -> None:
        """Drop the copy in memory: the policy has forgotten it already."""
        self._free_slot(block)
        block.state, block.slot, block.generation = BlockState.ON_DISK, NO_SLOT, 0
        block.offered = False
        self.counters.demoted_blocks_total += 1
        self.disk.arrived(block, use, self.now)
        self._refresh(block)
        self._events.moved(block)


def _request_of(block: Block) -> str:
    return "" if block.owner is None else request_of(block.owner.id)
