"""The KV pool of one node: which block is in which slot, who uses it, what goes next.

Pure: time comes in as `now` (seconds, monotonic), KV events go out through `take_events`.

    free -> pending -> written -> stored -> free      written: waits for an ancestor to be stored
               any of them -> withdrawn -> free       withdrawn: until its writer and readers left

What is stored is prefix-closed: a block becomes readable after its parent, only childless blocks
are evicted, and whatever else removes a block withdraws its descendants with it. So a pin on a
block protects its ancestors from eviction too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from workers.core.blocks import Block, BlockState
from workers.core.ids import BlockHash, OwnerId
from workers.core.messages import (
    KvEvent,
    LookupReply,
    PreparedStore,
    SlotRef,
    StoredSlot,
)
from workers.core.owners import Load, Owner, OwnerTable
from workers.core.policies.base import EvictionPolicy
from workers.core.pool_counters import PoolCounters
from workers.core.pool_events import EventNotes, RemovalCause
from workers.core.prefix_index import held_prefix
from workers.core.slots import SlotTable

MAX_GHOSTS: Final = 65_536


@dataclass(frozen=True, slots=True)
class ClientRef:
    """Who speaks: a connection's number and, for workers, the worker's id."""

    connection: int
    worker: str = ""


@dataclass(slots=True)
class PoolLimits:
    """Live settings. `write_queue_blocks` bounds the blocks being written at one time."""

    lease_seconds: float = 30.0
    write_queue_blocks: int = 500


class PoolState:
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
        self.slots = SlotTable(num_slots, first_generation)
        self.policy = policy
        self.blocks: dict[BlockHash, Block] = {}  # all but the withdrawn
        self.by_slot: dict[int, Block] = {}
        self.owners = OwnerTable()
        self._ghosts: dict[BlockHash, None] = {}  # evicted lately, oldest first
        self._events = EventNotes()
        self.writing: set[Block] = set()
        self.num_pinned = 0

    # --- reading ----------------------------------------------------------------------------

    def lookup(self, namespace: bytes, block_hashes: Sequence[bytes]) -> LookupReply:
        """How long a prefix is readable, and how many blocks after it are on their way."""
        num_held = held_prefix(lambda key: self._is_stored(namespace, key), block_hashes)
        num_pending = 0
        for key in block_hashes[num_held:]:
            if self._find(namespace, key) is None:
                break
            num_pending += 1
        self.counters.lookups_total += 1
        self.counters.lookup_blocks_total += len(block_hashes)
        self.counters.lookup_hit_blocks_total += num_held
        return LookupReply(num_held, num_pending)

    def prepare_load(
        self,
        client: ClientRef,
        owner_id: OwnerId,
        namespace: bytes,
        block_hashes: Sequence[bytes],
        now: float,
    ) -> list[SlotRef]:
        """Pin the readable prefix for the owner and name its slots. TooManyOwnersError."""
        chain = self._present(namespace, block_hashes)
        held = [block for block in chain if block.state is BlockState.STORED]
        if not held:
            return []
        owner = self._open(client, owner_id, now)
        self._use(held, owner, now)
        if owner.load is None:
            owner.load = Load(client.worker, now)
        owner.load.blocks.update(held)
        return [block.ref for block in held]

    def pin_prefix(
        self,
        client: ClientRef,
        owner_id: OwnerId,
        namespace: bytes,
        block_hashes: Sequence[bytes],
        now: float,
    ) -> int:
        """Pin what is stored or on its way; the number of blocks pinned. TooManyOwnersError."""
        chain = self._present(namespace, block_hashes)
        if chain:
            self._use(chain, self._open(client, owner_id, now), now)
        return len(chain)

    def report_corrupt(self, namespace: bytes, key: bytes, slot: int, generation: int) -> int:
        """A read failed: withdraw the block and its descendants; how many left.

        None does where the slot holds another generation by now: the reader was only late.
        """
        self.counters.load_failed_total += 1
        block = self._find(namespace, key)
        if block is None or (block.slot, block.generation) != (slot, generation):
            return 0
        self.counters.corrupt_total += 1
        for owner in block.pins:
            if owner.load is not None:
                owner.load.blocks.discard(block)
        return self._withdraw(block, "corrupt")

    def holds(self, namespace: bytes, block_hashes: Sequence[bytes]) -> str:
        """One letter a key, as in `HoldsReply.tiers`."""
        return "".join("d" if self._is_stored(namespace, key) else "-" for key in block_hashes)

    # --- storing ----------------------------------------------------------------------------

    def prepare_store(
        self,
        client: ClientRef,
        owner_id: OwnerId,
        namespace: bytes,
        parent: bytes,
        block_hashes: Sequence[bytes],
        now: float,
    ) -> PreparedStore:
        """Slots for what is missing of a chain, as far as there is room. TooManyOwnersError.

        Parent and chain, held or new, are pinned for the owner. Nothing is given after a hole:
        not where the parent is missing, nor behind a refused block.
        """
        num_above = 1 if parent else 0
        held = self._present(namespace, [parent, *block_hashes] if parent else block_hashes)
        num_held = max(0, len(held) - num_above)
        wanted = block_hashes[num_held:]
        owner = self._open(client, owner_id, now)
        self._use(held, owner, now)
        self._count_ghosts(wanted)
        given: list[SlotRef | None] = [None] * num_held
        if len(held) >= num_above:
            above = held[-1] if held else None
            room = self._make_room(min(len(wanted), self.write_queue_room))
            for key in wanted[:room]:
                if BlockHash(key) in self.blocks:
                    break  # a chain that meets itself, or another namespace's key
                above = self._add(client, owner, namespace, above, BlockHash(key))
                given.append(above.ref)
        num_refused = len(block_hashes) - len(given)
        self.counters.store_refused_total += num_refused
        self.owners.close_if_idle(owner)
        queue = (len(self.writing), self.limits.write_queue_blocks)
        return PreparedStore([*given, *[None] * num_refused], num_refused, queue)

    def complete_store(
        self, now: float, stored: Iterable[StoredSlot], failed: Iterable[SlotRef] = ()
    ) -> int:
        """The bytes are in place, or never will be; how many blocks took this in.

        A slot and generation that nobody is writing is ignored: its lease or its writer's
        connection ended, and the slot may be another's by now.
        """
        num_done = 0
        for item in stored:
            block = self._being_written(item.slot, item.generation)
            if block is not None:
                block.checksum = item.checksum
                self._end_write(block)
                if block.state is BlockState.PENDING:
                    block.state = BlockState.WRITTEN
                    self._publish(block, now)
                else:  # an ancestor was lost meanwhile
                    self.counters.store_failed_total += 1
                num_done += 1
        for ref in failed:
            block = self._being_written(ref.slot, ref.generation)
            if block is not None:
                self._fail_write(block)
                num_done += 1
        return num_done

    @property
    def write_queue_room(self) -> int:
        return max(0, self.limits.write_queue_blocks - len(self.writing))

    # --- owners -----------------------------------------------------------------------------

    def release(self, owner_id: OwnerId, now: float) -> int:
        """End every pin of the owner; how many there were. Its writes go on, unpinned."""
        owner = self.owners.get(owner_id)
        if owner is None:
            return 0
        self._end_load(owner, now)
        return self._unpin_all(owner)

    def renew(self, owner_ids: Iterable[OwnerId], now: float) -> int:
        """Extend leases; how many of these owners there are."""
        owners = [owner for owner in map(self.owners.get, owner_ids) if owner is not None]
        for owner in owners:
            owner.deadline = max(owner.deadline, now + self.limits.lease_seconds)
        return len(owners)

    def expire(self, now: float) -> int:
        """End the owners whose lease ran out, with their pins and writes; how many."""
        expired = self.owners.expired(now)
        for owner in expired:
            self._abandon(owner)
        self.counters.leases_expired_total += len(expired)
        return len(expired)

    def abandon_client(self, connection: int) -> None:
        """A connection ended: fail what it was writing, end the owners that end with it."""
        for block in [block for block in self.writing if block.client == connection]:
            self._fail_write(block)
        for owner in self.owners.of_client(connection):
            if not owner.outlives_connections:
                self._abandon(owner)

    # --- for the shell ----------------------------------------------------------------------

    def take_events(self) -> list[KvEvent]:
        """What changed for readers since the last call."""
        return self._events.take()

    # --- inside -----------------------------------------------------------------------------

    def _find(self, namespace: bytes, key: bytes) -> Block | None:
        block = self.blocks.get(BlockHash(key))
        return block if block is not None and block.namespace == namespace else None

    def _is_stored(self, namespace: bytes, key: bytes) -> bool:
        block = self._find(namespace, key)
        return block is not None and block.state is BlockState.STORED

    def _present(self, namespace: bytes, block_hashes: Sequence[bytes]) -> list[Block]:
        """The blocks of the longest prefix that is here, in whatever state."""
        chain: list[Block] = []
        for key in block_hashes:
            block = self._find(namespace, key)
            if block is None or (chain and block.parent is not chain[-1]):
                break
            chain.append(block)
        return chain

    def _open(self, client: ClientRef, owner_id: OwnerId, now: float) -> Owner:
        return self.owners.open(owner_id, client.connection, now + self.limits.lease_seconds)

    def _use(self, chain: Sequence[Block], owner: Owner, now: float) -> None:
        """Pin a chain and tell the policy of its use."""
        for block in chain:
            self._pin(block, owner)
        self.policy.accessed([block.key for block in chain], now)

    def _pin(self, block: Block, owner: Owner) -> None:
        if not block.pins:
            self.num_pinned += 1
        block.pins.add(owner)
        owner.pins.add(block)
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

    def _abandon(self, owner: Owner) -> None:
        """End an owner that will not end itself."""
        for block in list(owner.writes):
            if block.writing:
                self._fail_write(block)
        if owner.load is not None:
            self.counters.load_failed_total += len(owner.load.blocks)
            owner.load = None
        self._unpin_all(owner)

    def _end_load(self, owner: Owner, now: float) -> None:
        """Count a load that ended well, by pair of workers."""
        load, owner.load = owner.load, None
        if load is None or not load.blocks:
            return
        self.counters.loaded_blocks_total += len(load.blocks)
        seconds_each = max(0.0, now - load.started) / len(load.blocks)
        for source, num_blocks in Counter(block.worker for block in load.blocks).items():
            num_bytes = num_blocks * self.block_bytes
            self.counters.count_pair(source, load.worker, num_bytes, num_blocks * seconds_each)

    def _count_ghosts(self, wanted: Sequence[bytes]) -> None:
        for key in wanted:
            if BlockHash(key) in self._ghosts:
                del self._ghosts[BlockHash(key)]
                self.counters.evicted_wanted_again_total += 1

    def _make_room(self, num_wanted: int) -> int:
        """Free slots for up to `num_wanted` blocks, evicting if need be; for how many."""
        missing = num_wanted - self.slots.num_free
        if missing > 0:
            self.counters.evict_attempts_total += 1
            if not self._evict(missing):
                self.counters.starved_by_pins_total += 1
                while self._evict(1):
                    pass
        return min(num_wanted, self.slots.num_free)

    def _evict(self, num_blocks: int) -> bool:
        gone: Counter[BlockHash] = Counter()

        def uncovers(victim: BlockHash) -> BlockHash | None:
            parent = self.blocks[victim].parent
            if parent is None:
                return None
            gone[parent.key] += 1
            left = len(parent.children) - gone[parent.key]
            free = parent.state is BlockState.STORED and not parent.pins and not left
            return parent.key if free else None

        victims = self.policy.evict(num_blocks, uncovers)
        if victims is None:
            return False
        for key in victims:  # the policy forgot them: it must not be told of them again
            self.blocks[key].offered = True
        for key in victims:
            self._withdraw(self.blocks[key], "capacity")
            self._ghosts[key] = None
        while len(self._ghosts) > MAX_GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]
        return True

    def _add(
        self,
        client: ClientRef,
        owner: Owner,
        namespace: bytes,
        parent: Block | None,
        key: BlockHash,
    ) -> Block:
        taken = self.slots.take()
        assert taken is not None, "room was made before"
        slot, generation = taken
        block = Block(
            key, namespace, slot, generation, parent, client.connection, owner, client.worker
        )
        self.blocks[key] = self.by_slot[slot] = block
        owner.writes.add(block)
        self.writing.add(block)
        self._pin(block, owner)
        if parent is not None:
            parent.children[key] = block
            self._refresh(parent)
        return block

    def _being_written(self, slot: int, generation: int) -> Block | None:
        block = self.by_slot.get(slot)
        if block is None or block.generation != generation or not block.writing:
            return None
        return block

    def _end_write(self, block: Block) -> None:
        block.writing = False
        self.writing.discard(block)
        block.owner.writes.discard(block)
        self.owners.close_if_idle(block.owner)
        self._free_if_idle(block)

    def _fail_write(self, block: Block) -> None:
        self.counters.store_failed_total += 1
        if block.state is BlockState.PENDING:
            self._withdraw(block, "failed_write")
        self._end_write(block)

    def _publish(self, block: Block, now: float) -> None:
        """Make a written block readable, with its written descendants, if its parent is."""
        ready = [block]
        while ready:
            block = ready.pop()
            if block.parent is not None and block.parent.state is not BlockState.STORED:
                continue
            block.state = BlockState.STORED
            self.counters.stored_blocks_total += 1
            self.policy.stored(block.key, now)
            self._refresh(block)
            self._events.stored(block)
            ready += [b for b in block.children.values() if b.state is BlockState.WRITTEN]

    def _withdraw(self, top: Block, cause: RemovalCause) -> int:
        """Take a block and its descendants out of the index; how many were readable."""
        if top.parent is not None:
            del top.parent.children[top.key]
            self._refresh(top.parent)
        readable: list[BlockHash] = []
        subtree = [top]
        while subtree:
            block = subtree.pop()
            self.counters.evicted_by_cause[cause] += 1
            subtree += block.children.values()
            if block.state is BlockState.STORED:
                readable.append(block.key)
                self.policy.removed(block.key)
            else:
                self._drop_pins(block)
            self._forget(block)
        if readable:
            self._events.removed(top.namespace, readable, cause)
        return len(readable)

    def _forget(self, block: Block) -> None:
        del self.blocks[block.key]
        block.state = BlockState.WITHDRAWN
        block.children.clear()
        block.parent = None
        block.offered = False
        self._free_if_idle(block)

    def _drop_pins(self, block: Block) -> None:
        """Nobody can be reading a block that never was readable."""
        for owner in list(block.pins):
            self._unpin(block, owner)
            self.owners.close_if_idle(owner)

    def _refresh(self, block: Block) -> None:
        """Keep the policy's candidates in step."""
        if block.evictable != block.offered:
            block.offered = not block.offered
            if block.offered:
                self.policy.offer(block.key)
            else:
                self.policy.withhold(block.key)

    def _free_if_idle(self, block: Block) -> None:
        if block.slot_idle and self.by_slot.get(block.slot) is block:
            del self.by_slot[block.slot]
            self.slots.give_back(block.slot)
