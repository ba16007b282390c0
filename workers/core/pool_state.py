"""The KV pool of one node: which block is where, who uses it, what goes next.

Pure: time comes in as `now` (seconds, monotonic), KV events go out through `take_events`, work for
the disk through `disk.take_jobs`. `pool_base` has the states and elementary changes, `pool_tiers`
the way to disk and back, `pool_room` eviction; here is what clients ask for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from workers.core.blocks import Block, BlockState
from workers.core.ids import BlockHash, OwnerId, request_of
from workers.core.labels import Labels
from workers.core.messages import KvEvent, LookupReply, PreparedStore, SlotRef, StoredSlot
from workers.core.owners import Load, Owner
from workers.core.policies.base import EvictionPolicy
from workers.core.pool_active import ActiveTails
from workers.core.pool_base import ClientRef, PoolLimits, StoreKind
from workers.core.pool_room import RoomyPool
from workers.core.prefix_index import held_prefix
from workers.core.quotas import Group
from workers.core.tiers import Urgency

__all__ = ["ClientRef", "PoolLimits", "PoolState"]


class PoolState(RoomyPool):
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
        super().__init__(
            num_slots, policy, limits, block_bytes=block_bytes, first_generation=first_generation
        )
        self.active = ActiveTails(self._keeps_changed)
        self.labels = Labels()
        self.policy.label_of = self.disk.evictor.label_of = self.labels.of

    # --- reading ----------------------------------------------------------------------------

    def lookup(self, namespace: bytes, block_hashes: Sequence[bytes]) -> LookupReply:
        """How long a prefix is readable, from memory and from disk, and what is on its way."""
        found = self.peek(namespace, block_hashes)
        self.counters.lookups_total += 1
        self.counters.lookup_blocks_total += len(block_hashes)
        self.counters.lookup_hit_blocks_total += found.num_held + found.num_on_disk
        return found

    def peek(self, namespace: bytes, block_hashes: Sequence[bytes]) -> LookupReply:
        """`lookup` for our own purposes: it is not counted."""
        num_held = held_prefix(lambda key: self._is_stored(namespace, key), block_hashes)
        rest = block_hashes[num_held:]
        num_on_disk = num_pending = 0
        if rest and self.disk.by_slot:
            num_on_disk = held_prefix(lambda key: self._is_held(namespace, key), rest)
        for key in rest:
            block = self._find(namespace, key)
            if block is None:
                break
            if block.state is BlockState.ON_DISK and not self.disk.is_wanted(block):
                break
            num_pending += 1
        return LookupReply(num_held, num_pending, num_on_disk)

    def holds(self, namespace: bytes, block_hashes: Sequence[bytes]) -> str:
        """One letter a key, as in `HoldsReply.tiers`."""
        blocks = (self._find(namespace, key) for key in block_hashes)
        return "".join(map(_tier_letter, blocks))

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
        """Pin what is held or on its way; the number of blocks pinned. TooManyOwnersError."""
        chain = self._present(namespace, block_hashes)
        if chain:
            self._use(chain, self._open(client, owner_id, now), now)
        return len(chain)

    def is_pinned_beside(
        self, namespace: bytes, block_hashes: Sequence[bytes], owner_ids: Collection[OwnerId]
    ) -> bool:
        """Whether others than these owners keep one of these blocks, held or on its way."""
        return any(
            owner.id not in owner_ids
            for block in self._present(namespace, block_hashes)
            for owner in block.pins
        )

    def promote(
        self,
        client: ClientRef,
        owner_id: OwnerId,
        namespace: bytes,
        block_hashes: Sequence[bytes],
        urgency: Urgency,
        now: float,
    ) -> LookupReply:
        """Pin a chain and begin to read what of it lies on disk. TooManyOwnersError."""
        chain = self._present(namespace, block_hashes)
        if chain:
            self._use(chain, self._open(client, owner_id, now), now)
            line = self._disk_ancestors(chain[0])
            self._hold(line, owner_id)
            self._want([*line, *chain], urgency)
        return self.lookup(namespace, block_hashes)

    def hint(
        self,
        namespace: bytes,
        block_hashes: Sequence[bytes],
        session: Literal["continue", "over"],
        now: float,
    ) -> int:
        """The session of this chain goes on or is over; how many blocks of it are here."""
        self.now = max(self.now, now)
        chain = self._present(namespace, block_hashes)
        keys = [block.key for block in chain]
        self.policy.hint(keys, session, self.now)
        self.disk.evictor.hint(keys, session, self.now)
        if session == "over":
            self.active.over(chain)
        else:
            self._note_active(chain)
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

    # --- storing ----------------------------------------------------------------------------

    def prepare_store(
        self,
        client: ClientRef,
        owner_id: OwnerId,
        namespace: bytes,
        parent: bytes,
        block_hashes: Sequence[bytes],
        now: float,
        tenant: str = "",
    ) -> PreparedStore:
        """Slots for what is missing of a chain, as far as there is room. TooManyOwnersError.

        Parent and chain, held or new, are pinned for the owner; what of them lies on disk is
        promoted. Nothing is given after a hole: not where the parent is missing, nor behind a
        refused block.
        """
        num_above = 1 if parent else 0
        held = self._present(namespace, [parent, *block_hashes] if parent else block_hashes)
        num_held = max(0, len(held) - num_above)
        wanted = block_hashes[num_held:]
        owner = self._open(client, owner_id, now)
        self._use(held, owner, now)
        self.counters.evicted_wanted_again_total += self.history.wanted(
            map(BlockHash, wanted), self.now
        )
        given: list[SlotRef | None] = [None] * num_held
        if len(held) >= num_above and self._bring_back(held):
            kind = StoreKind(namespace, tenant)
            above = held[-1] if held else None
            added = self._add_chain(client, owner, above, wanted, kind)
            self._note_active([*held, *added])
            given += [block.ref for block in added]
        num_refused = len(block_hashes) - len(given)
        self.counters.store_refused_total += num_refused
        self.owners.close_if_idle(owner)
        queue = (len(self.writing), self.limits.write_queue_blocks)
        return PreparedStore([*given, *[None] * num_refused], num_refused, queue)

    def _add_chain(
        self,
        client: ClientRef,
        owner: Owner,
        above: Block | None,
        wanted: Sequence[bytes],
        kind: StoreKind,
    ) -> list[Block]:
        """Pending blocks for the head of `wanted`, as far as quotas and memory have room."""
        room = min(len(wanted), self.write_queue_room)
        self._note_demand(room)
        room = self._room_in_quotas(self.groups.of(kind.tenant, kind.namespace), room)
        room = self._make_room(room)
        added: list[Block] = []
        for key in wanted[:room]:
            if BlockHash(key) in self.blocks:
                break  # a chain that meets itself, or another namespace's key
            above = self._add(client, owner, above, BlockHash(key), kind)
            added.append(above)
        return added

    def _bring_back(self, held: Sequence[Block]) -> bool:
        """Promote what of a chain lies on disk; False where that is not possible now, since
        nothing may be written below a block that is not in memory."""
        if not held or held[-1].state is not BlockState.ON_DISK:
            return True
        line = self._disk_ancestors(held[0])
        self._promote_now([*line, *held], "batch")
        return held[-1].state is not BlockState.ON_DISK

    def _hold(self, blocks: Sequence[Block], owner_id: OwnerId) -> None:
        """Pin these for an owner that there is."""
        owner = self.owners.get(owner_id)
        assert owner is not None, "it was opened just now"
        for block in blocks:
            self._pin(block, owner)

    @staticmethod
    def _disk_ancestors(block: Block) -> list[Block]:
        """Those that lie on disk only, head first."""
        line: list[Block] = []
        above = block.parent
        while above is not None and above.state is BlockState.ON_DISK:
            line.append(above)
            above = above.parent
        return line[::-1]

    def complete_store(
        self, now: float, stored: Iterable[StoredSlot], failed: Iterable[SlotRef] = ()
    ) -> int:
        """The bytes are in place, or never will be; how many blocks took this in.

        A slot and generation that nobody is writing is ignored: its lease or its writer's
        connection ended, and the slot may be another's by now.
        """
        self.now = max(self.now, now)
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
            owner.renewed = True
        return len(owners)

    def never_expires(self, owner_id: OwnerId) -> None:
        """For the agent's own doings, which it always ends itself."""
        owner = self.owners.get(owner_id)
        if owner is not None:
            owner.deadline = math.inf

    def expire(self, now: float) -> int:
        """End the owners whose lease ran out, with their pins and writes; how many."""
        self.now = max(self.now, now)
        self.active.expire(now)
        for slot in [slot for slot, until in self.quarantined.items() if until <= now]:
            del self.quarantined[slot]
            self.changed_slots.add(slot)
            self.slots.give_back(slot)
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

    def _use(self, chain: Sequence[Block], owner: Owner, now: float) -> None:
        """Pin a chain and tell the policies of its use."""
        self.now = max(self.now, now)
        for block in chain:
            self._pin(block, owner)
        keys = [block.key for block in chain]
        request = request_of(owner.id)
        self.policy.accessed(keys, now, request)
        if self.disk.by_slot:
            self.disk.evictor.accessed(keys, now, request)
        self._note_active(chain)

    def _note_active(self, chain: Sequence[Block]) -> None:
        most = int(self.limits.pin_active_share * self.slots.num_slots)
        deadline = self.now + self.limits.lease_seconds
        self.active.used(chain, self.limits.pin_active_blocks, most, deadline)

    def _give_up_active(self, group: Group) -> bool:
        return self.active.give_up(group) > 0

    def _keeps_changed(self, block: Block) -> None:
        if block.keeps and block.leaving:
            self._stay(block)
        if block.state is not BlockState.WITHDRAWN:
            self._refresh(block)

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
        if not load.worker:
            return  # another node's: its transfers are counted there
        seconds_each = max(0.0, now - load.started) / len(load.blocks)
        for source, num_blocks in Counter(block.worker for block in load.blocks).items():
            num_bytes = num_blocks * self.block_bytes
            self.counters.count_pair(source, load.worker, num_bytes, num_blocks * seconds_each)


def _tier_letter(block: Block | None) -> str:
    if block is None or not block.held:
        return "-"
    return "d" if block.state is BlockState.STORED else "s"
