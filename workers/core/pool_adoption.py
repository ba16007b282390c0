"""Blocks of a former life taken into a new pool: from the slab by its journal, from SSD by its
index. Pure: the shell has looked at the bytes, or leaves that to the first read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from workers.core.blocks import NO_SLOT, Block, BlockState, DiskCopy
from workers.core.ids import BlockHash, OwnerId
from workers.core.policies.base import BlockUse
from workers.core.pool_state import PoolState
from workers.core.slots import SlotTable
from workers.core.tiers import BlockRecord, Forget

ADOPTED_OWNER: Final = OwnerId("transfer:adopted")
GRACE_SECONDS: Final = 2.0
"""What was adopted is not evicted before that: readers of the former agent may still be at it."""
NO_CONNECTION: Final = -2


def adopt_in_memory(
    pool: PoolState, records: Sequence[BlockRecord], writing: Mapping[int, int], now: float
) -> int:
    """Into a pool that is new. `writing` are slots that a client may still be filling: they rest
    for a lease. How many blocks were taken; others lack an ancestor."""
    assert not pool.blocks, "the pool is in use already"
    pool.now = max(pool.now, now)
    chosen = in_chain_order(records, lambda _: False)
    used = {record.slot: record.generation for record in chosen}
    resting = {slot: gen for slot, gen in writing.items() if slot not in used}
    resting = {slot: gen for slot, gen in resting.items() if slot < pool.slots.num_slots}
    pool.slots = SlotTable(pool.slots.num_slots, pool.first_generation, used | resting)
    pool.quarantined = dict.fromkeys(resting, now + pool.limits.lease_seconds)
    pool.changed_slots.update(range(pool.slots.num_slots))
    for record in chosen:
        block = _block_of(pool, record, BlockState.STORED)
        pool.by_slot[record.slot] = block
        pool._link(block)
        pool.policy.adopt(BlockUse(block.key, now, 1, False), now)
        pool._refresh(block)
        pool._events.stored(block)
    if chosen:
        owner = pool.owners.open(ADOPTED_OWNER, NO_CONNECTION, now + GRACE_SECONDS)
        for record in chosen:
            pool._pin(pool.blocks[BlockHash(record.key)], owner)
    return len(chosen)


def adopt_on_disk(
    pool: PoolState, records: Iterable[BlockRecord], num_slots: int, now: float
) -> int:
    """Open the pool's disk tier with what its index names; how many blocks were taken.

    A key that the pool has by now is left out, and so is what hangs on nothing held.
    """
    pool.now = max(pool.now, now)
    records = list(records)
    fresh = [record for record in records if BlockHash(record.key) not in pool.blocks]
    chosen = in_chain_order(fresh, lambda record: _hangs_on_held(pool, record))
    used = {record.slot: record.generation for record in chosen}
    pool.disk.open(SlotTable(num_slots, pool.first_generation, used))
    for record in chosen:
        block = _block_of(pool, record, BlockState.ON_DISK)
        pool._link(block)
        pool.disk.adopt(block, DiskCopy(record.slot, record.generation, ready=True), now)
        pool._refresh(block)
        pool._events.stored(block)
    left = [record for record in records if used.get(record.slot) != record.generation]
    pool.disk.add_jobs(Forget(record.slot, record.generation) for record in left)
    return len(chosen)


def in_chain_order(
    records: Iterable[BlockRecord], has_parent: Callable[[BlockRecord], bool]
) -> list[BlockRecord]:
    """Parents before children, without what has no whole line to a head or to what is there.

    Of several records of one key, the latest counts.
    """
    latest: dict[bytes, BlockRecord] = {}
    for record in records:
        known = latest.get(record.key)
        if known is None or known.generation < record.generation:
            latest[record.key] = record
    below: dict[tuple[bytes, bytes], list[BlockRecord]] = {}
    ready: list[BlockRecord] = []
    for record in latest.values():
        if not record.parent or has_parent(record):
            ready.append(record)
        else:
            below.setdefault((record.namespace, record.parent), []).append(record)
    chosen: list[BlockRecord] = []
    while ready:
        record = ready.pop()
        chosen.append(record)
        ready += below.pop((record.namespace, record.key), [])
    return chosen


def _hangs_on_held(pool: PoolState, record: BlockRecord) -> bool:
    parent = pool._find(record.namespace, record.parent)
    return parent is not None and parent.held


def _block_of(pool: PoolState, record: BlockRecord, state: BlockState) -> Block:
    in_memory = state is BlockState.STORED
    parent = pool.blocks.get(BlockHash(record.parent)) if record.parent else None
    return Block(
        key=BlockHash(record.key),
        namespace=record.namespace,
        slot=record.slot if in_memory else NO_SLOT,
        generation=record.generation if in_memory else 0,
        parent=parent,
        client=NO_CONNECTION,
        owner=None,
        worker="",
        tenant=record.tenant,
        groups=pool.groups.of(record.tenant, record.namespace),
        state=state,
        writing=False,
        checksum=record.checksum,
    )
