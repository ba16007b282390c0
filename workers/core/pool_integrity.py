"""What must hold of a pool between any two calls. Called by tests after each step, and by the
agent when it is idle and told to."""

from __future__ import annotations

from collections import Counter

from workers.core.blocks import NO_SLOT, Block, BlockState
from workers.core.pool_state import PoolState


def check_integrity(pool: PoolState) -> None:
    """AssertionError names what is wrong. Reads only."""
    _check_slots(pool)
    _check_tree(pool)
    _check_owners(pool)
    _check_disk(pool)
    _check_groups(pool)
    _check_policy(pool)


def _all_blocks(pool: PoolState) -> set[Block]:
    """With the withdrawn ones that are still in use."""
    return {*pool.blocks.values(), *pool.by_slot.values(), *pool.disk.by_slot.values()}


def _check_slots(pool: PoolState) -> None:
    free, used = pool.slots.free_slots(), set(pool.by_slot) | set(pool.quarantined)
    assert not set(pool.by_slot) & set(pool.quarantined), "a slot in quarantine is used"
    assert not free & used, f"slots {free & used} are free and used"
    assert len(free) + len(used) == pool.slots.num_slots, "a slot is lost"
    for slot, block in pool.by_slot.items():
        assert block.slot == slot, f"slot {slot} lists a block of slot {block.slot}"
        assert not block.slot_idle, f"slot {slot} waits for nobody"
        listed = pool.blocks.get(block.key) is block
        assert listed == (block.state is not BlockState.WITHDRAWN), f"{block.state}: {listed=}"
    writing = {block for block in pool.by_slot.values() if block.writing}
    assert writing == pool.writing, "the write queue is out of step"
    pinned = sum(1 for block in _all_blocks(pool) if block.pins)
    assert pinned == pool.num_pinned, f"{pinned} blocks are pinned, counted {pool.num_pinned}"


def _check_tree(pool: PoolState) -> None:
    for key, block in pool.blocks.items():
        assert block.key == key
        _check_family(pool, block)
        has_slot = pool.by_slot.get(block.slot) is block
        assert has_slot == (block.state is not BlockState.ON_DISK), f"{block.state}: {has_slot=}"
        match block.state:
            case BlockState.PENDING:
                assert block.writing, "pending without a writer"
            case BlockState.WRITTEN | BlockState.PROMOTED:
                parent = block.parent
                assert parent is not None, f"{block.state} at a chain's head must be stored"
                assert parent.state is not BlockState.STORED, f"{block.state} below a stored parent"
            case BlockState.STORED:
                assert not block.writing, "stored and still being written"
            case BlockState.ON_DISK:
                assert block.slot == NO_SLOT, "on disk only, with a slot"
            case BlockState.PROMOTING:
                assert block.copying, "promoting without a reader"
            case BlockState.WITHDRAWN:
                raise AssertionError("a withdrawn block is in the index")


def _check_family(pool: PoolState, block: Block) -> None:
    parent = block.parent
    if parent is not None:
        assert pool.blocks.get(parent.key) is parent, "a hole: the parent is gone"
        assert parent.children.get(block.key) is block, "the parent does not know its child"
        stored = block.state is BlockState.STORED
        assert not stored or parent.state is BlockState.STORED, "a hole: stored below unstored"
        assert not block.held or parent.held, "a hole: held below what is not"
        assert not block.near or parent.near, "a hole: near below what is on disk only"
    children = block.children.values()
    assert all(child.parent is block for child in children), "a child of somebody else"
    num_leaving = sum(child.leaving for child in children)
    assert block.num_leaving == num_leaving, "leaving children are miscounted"
    num_near = sum(child.near for child in children) - num_leaving
    assert block.num_near == num_near, "near children are miscounted"


def _check_owners(pool: PoolState) -> None:
    owners = pool.owners.all()
    for owner in owners:
        assert owner.pins or owner.writes or owner.load, f"{owner.id} holds nothing"
        for block in owner.pins:
            assert owner in block.pins, f"{owner.id} pins a block that does not know"
            if block.state is not BlockState.ON_DISK:
                assert pool.by_slot.get(block.slot) is block, f"{owner.id} pins a reused slot"
        for block in owner.writes:
            assert block.writing, f"{owner.id} writes what is written"
            assert block.owner is owner, f"{owner.id} writes another's block"
        if owner.load is not None:
            assert owner.load.blocks <= owner.pins, f"{owner.id} reads what it has not pinned"
    pins = sum(len(owner.pins) for owner in owners)
    assert pins == sum(len(block.pins) for block in _all_blocks(pool)), "a pin has no owner"
    writes = sum(len(owner.writes) for owner in owners)
    assert writes == len(pool.writing), "a write has no owner"


def _check_disk(pool: PoolState) -> None:
    disk = pool.disk
    free, used = disk.slots.free_slots(), set(disk.by_slot)
    assert not free & used, f"disk slots {free & used} are free and used"
    assert len(free) + len(used) == disk.slots.num_slots, "a disk slot is lost"
    for slot, block in disk.by_slot.items():
        assert block.disk is not None, f"disk slot {slot} lists a block without a copy"
        assert block.disk.slot == slot, f"disk slot {slot} lists a block of {block.disk.slot}"
        gone = block.state is BlockState.WITHDRAWN
        assert not gone or block.copying, f"disk slot {slot} waits for nobody"
    blocks = _all_blocks(pool)
    assert sum(block.copying for block in blocks) == disk.num_writes + disk.num_reads
    assert {block for block in blocks if block.leaving} == set(disk.leaving)
    for block in blocks:
        if block.disk is not None:
            assert disk.by_slot.get(block.disk.slot) is block, "a copy in another's disk slot"
        if block.held and block.state is not BlockState.STORED:
            assert block.disk is not None, f"{block.state} without a copy"
            assert block.disk.ready, f"{block.state} with half a copy"
        if block.leaving:
            assert block.state is BlockState.STORED, f"{block.state} and leaving"
            assert not block.pins, "in use and leaving"
            assert not block.num_near, "leaves before its children"
            waits = block.copying or block.num_leaving
            assert waits, "leaving, and nothing keeps it"
    twice = {b for b in blocks if b.near and b.disk is not None and b.disk.ready and not b.leaving}
    twice = {b for b in twice if b.state is BlockState.STORED}
    assert twice == set(disk.duplicates), "copies of what is in memory are out of step"


def _check_groups(pool: PoolState) -> None:
    held = Counter(id(group) for block in pool.blocks.values() for group in block.groups)
    for group in pool.groups.all():
        found = held.pop(id(group), 0)
        assert found == group.used_blocks, f"{group.name}: {found} blocks, not {group.used_blocks}"
    assert not held, "a block counts for a group that is gone"


def _check_policy(pool: PoolState) -> None:
    in_memory = on_disk = 0
    for block in _all_blocks(pool):
        assert block.offered == block.evictable, f"{block.state}: offered is {block.offered}"
        if block.state is BlockState.ON_DISK:
            on_disk += block.offered
        else:
            in_memory += block.offered
    assert in_memory == pool.policy.num_candidates(), "the policy knows other candidates"
    assert on_disk == pool.disk.evictor.num_candidates(), "the disk's policy knows others"
    kept = sum(block.keeps for block in _all_blocks(pool))
    assert kept <= pool.active.num_kept, "a block is kept by nobody"
