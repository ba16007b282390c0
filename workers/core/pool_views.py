"""What is read off a pool now and then. Changes nothing."""

from __future__ import annotations

from workers.core.blocks import Block, BlockState
from workers.core.messages import BlocksStored
from workers.core.pool_events import parent_key, tier_of
from workers.core.pool_state import PoolState


def stored_runs(pool: PoolState) -> list[BlocksStored]:
    """All held blocks as runs of chains within one tier, parents before children."""
    runs: list[BlocksStored] = []
    heads = [b for b in pool.blocks.values() if b.parent is None and b.held]
    while heads:
        block = heads.pop()
        run = BlocksStored(block.namespace, parent_key(block), [block.key], tier_of(block))
        runs.append(run)
        while len(below := [b for b in block.children.values() if b.held]) == 1:
            if tier_of(below[0]) != run.tier:
                break
            block = below[0]
            run.block_hashes.append(block.key)
        heads += below
    return runs


def num_pending(pool: PoolState) -> int:
    """Blocks on their way to be readable: being written, or waiting for such an ancestor."""
    waiting = [b for b in pool.writing if b.state is BlockState.PENDING]
    pending: set[Block] = set(waiting)
    while waiting:
        for child in waiting.pop().children.values():
            if child not in pending:
                pending.add(child)
                waiting.append(child)
    return len(pending)
