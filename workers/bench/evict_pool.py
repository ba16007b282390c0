"""What the pool does around an eviction policy, and nothing else: for hit ratios on traces.

A request finds its longest held prefix, makes room for the rest all at once, and stores it. The
prefix is pinned meanwhile, and only blocks without children are candidates, as in the pool.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from workers.bench.evict_traces import TraceRequest
from workers.core.ids import BlockHash
from workers.core.policies.base import EvictionPolicy

_ABSENT: Final = -1
_NONE: Final = -1
_NEVER: Final = 1 << 60


class Outcome(NamedTuple):
    """`seconds` of processor time for the whole trace."""

    hit_blocks: int
    seconds: float


class TracePool:
    """Blocks are small integers, which serve as keys: policies only hash and compare them."""

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int, num_ids: int) -> None:
        self._policy = policy
        self._room = capacity_blocks
        self._children = [_ABSENT] * num_ids  # number of held ones; _ABSENT: not held
        self._parent = [_NONE] * num_ids
        self._pinned = _NONE  # the tail of the prefix in use; its ancestors have children

    def request(self, chain: Sequence[int], now: float, label: str = "") -> int:
        """Use and store this chain; the length of the prefix that was held."""
        children, policy = self._children, self._policy
        num_held = 0
        for block in chain:
            if children[block] == _ABSENT:
                break
            num_held += 1
        held, new = chain[:num_held], chain[num_held:]
        self._pinned = held[-1] if held else _NONE
        if held and not children[self._pinned]:
            policy.withhold(_key(self._pinned))
        policy.accessed(held, now, label)  # type: ignore[arg-type]  # integers as keys
        missing = len(new) - self._room
        if missing > 0:
            self._make_room(missing, now)
            new = new[: self._room]  # all, unless a request is larger than the pool
        above = self._pinned
        for block in new:
            policy.stored(_key(block), now, label)
            self._parent[block] = above
            children[block] = 0
            if above != _NONE:
                children[above] += 1
            above = block
        self._room -= len(new)
        if above != _NONE and not children[above]:
            policy.offer(_key(above))
        return num_held

    def _make_room(self, num_blocks: int, now: float) -> None:
        """So many blocks, or what can be had."""
        if self._policy.evict(num_blocks, self._uncovers, now) is not None:
            self._room += num_blocks
            return
        while self._policy.evict(1, self._uncovers, now):
            self._room += 1

    def _uncovers(self, victim: BlockHash) -> BlockHash | None:
        block: int = victim  # type: ignore[assignment]  # integers as keys
        parent = self._parent[block]
        self._children[block] = _ABSENT
        if parent == _NONE:
            return None
        self._children[parent] -= 1
        return _key(parent) if not self._children[parent] and parent != self._pinned else None


def replay(
    policy: EvictionPolicy,
    trace: Sequence[TraceRequest],
    capacity_blocks: int,
    num_ids: int,
    *,
    labelled: bool = False,
) -> Outcome:
    """Hits of a policy on a trace. Only those that keep them store partly filled last blocks."""
    whole = policy.keeps_partial_blocks
    chains = [request.blocks if whole else request.blocks[: request.num_full] for request in trace]
    labels = [request.label if labelled else "" for request in trace]
    pool = TracePool(policy, capacity_blocks, num_ids)
    hits = 0
    started = time.process_time()
    for request, chain, label in zip(trace, chains, labels, strict=True):
        hits += pool.request(chain, request.now, label)
    return Outcome(hits, time.process_time() - started)


def replay_min(trace: Sequence[TraceRequest], capacity_blocks: int, num_ids: int) -> Outcome:
    """The offline optimum: what is used again last goes first, what is never used is not stored.

    A parent is used again no later than its child, so the prefix rule holds by itself.
    """
    started = time.process_time()
    next_uses = _next_uses(trace, num_ids)
    due = [_NEVER] * num_ids  # next use of what is held
    heap: list[tuple[int, int, int]] = []
    hits = num_held = 0
    for request, uses in zip(trace, next_uses, strict=True):
        unbroken = True
        for depth, (block, use) in enumerate(zip(request.blocks, uses, strict=True)):
            was_held = due[block] != _NEVER
            unbroken = unbroken and was_held
            hits += unbroken
            num_held += (use != _NEVER) - was_held
            due[block] = use
            if use != _NEVER:
                heapq.heappush(heap, (-use, -depth, block))
        while num_held > capacity_blocks:
            use, _, block = heapq.heappop(heap)
            if due[block] == -use:
                due[block] = _NEVER
                num_held -= 1
    return Outcome(hits, time.process_time() - started)


def _next_uses(trace: Sequence[TraceRequest], num_ids: int) -> list[list[int]]:
    """For each block of each request the number of the next request that uses it."""
    upcoming = [_NEVER] * num_ids
    found: list[list[int]] = []
    for number in range(len(trace) - 1, -1, -1):
        blocks = trace[number].blocks
        found.append([upcoming[block] for block in blocks])
        for block in blocks:
            upcoming[block] = number
    return found[::-1]


def _key(block: int) -> BlockHash:
    return block  # type: ignore[return-value]  # integers as keys
