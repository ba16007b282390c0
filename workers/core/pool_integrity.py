"""What must hold of a pool between any two calls. Called by tests after each step, and by the
agent when it is idle and told to."""

from __future__ import annotations

from workers.core.blocks import Block, BlockState
from workers.core.pool_state import PoolState


def check_integrity(pool: PoolState) -> None:
    """AssertionError names what is wrong. Reads only."""
    _check_slots(pool)
    _check_tree(pool)
    _check_owners(pool)
    _check_policy(pool)


def _check_slots(pool: PoolState) -> None:
    free, used = pool.slots.free_slots(), set(pool.by_slot)
    assert not free & used, f"slots {free & used} are free and used"
    assert len(free) + len(used) == pool.slots.num_slots, "a slot is lost"
    for slot, block in pool.by_slot.items():
        assert block.slot == slot, f"slot {slot} lists a block of slot {block.slot}"
        assert not block.slot_idle, f"slot {slot} waits for nobody"
        listed = pool.blocks.get(block.key) is block
        assert listed == (block.state is not BlockState.WITHDRAWN), f"{block.state}: {listed=}"
    assert len(pool.blocks) <= len(pool.by_slot), "a block has no slot"
    writing = {block for block in pool.by_slot.values() if block.writing}
    assert writing == pool.writing, "the write queue is out of step"
    pinned = sum(1 for block in pool.by_slot.values() if block.pins)
    assert pinned == pool.num_pinned, f"{pinned} blocks are pinned, counted {pool.num_pinned}"


def _check_tree(pool: PoolState) -> None:
    for key, block in pool.blocks.items():
        assert block.key == key
        _check_family(pool, block)
        match block.state:
            case BlockState.PENDING:
                assert block.writing, "pending without a writer"
            case BlockState.WRITTEN:
                parent = block.parent
                assert parent is not None, "a written head must be stored"
                assert parent.state is not BlockState.STORED, "written below a stored parent"
            case BlockState.STORED:
                assert not block.writing, "stored and still being written"
            case BlockState.WITHDRAWN:
                raise AssertionError("a withdrawn block is in the index")


def _check_family(pool: PoolState, block: Block) -> None:
    parent = block.parent
    if parent is not None:
        assert pool.blocks.get(parent.key) is parent, "a hole: the parent is gone"
        assert parent.children.get(block.key) is block, "the parent does not know its child"
        stored = block.state is BlockState.STORED
        assert not stored or parent.state is BlockState.STORED, "a hole: stored below unstored"
    for child in block.children.values():
        assert child.parent is block, "a child of somebody else"


def _check_owners(pool: PoolState) -> None:
    owners = pool.owners.all()
    for owner in owners:
        assert owner.pins or owner.writes or owner.load, f"{owner.id} holds nothing"
        for block in owner.pins:
            assert owner in block.pins, f"{owner.id} pins a block that does not know"
            assert pool.by_slot.get(block.slot) is block, f"{owner.id} pins a reused slot"
        for block in owner.writes:
            assert block.writing, f"{owner.id} writes what is written"
            assert block.owner is owner, f"{owner.id} writes another's block"
        if owner.load is not None:
            assert owner.load.blocks <= owner.pins, f"{owner.id} reads what it has not pinned"
    pins = sum(len(owner.pins) for owner in owners)
    assert pins == sum(len(block.pins) for block in pool.by_slot.values()), "a pin has no owner"
    writes = sum(len(owner.writes) for owner in owners)
    assert writes == len(pool.writing), "a write has no owner"


def _check_policy(pool: PoolState) -> None:
    candidates = 0
    for block in pool.by_slot.values():
        assert block.offered == block.evictable, f"{block.state}: offered is {block.offered}"
        candidates += block.offered
    assert candidates == pool.policy.num_candidates(), "the policy knows other candidates"
