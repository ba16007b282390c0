"""Which blocks go to another node before anybody there asks: hot ones (R33), and what decode will
need (R15). Pure; the shell sends the fetches.

A block is hot when several requests wanted it lately. Hot blocks are copied to the node that was
chosen far behind the best holder without a transfer of its own (they may come while the request
waits its turn), or, where the holder itself is what requests queue for, to the idlest node that
lacks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from controlplane.core.routing import Priced, is_far_behind

HOT_REQUESTS: Final = 3
"""Wanted by so many requests within one to two `WINDOW_SECONDS`."""
WINDOW_SECONDS: Final = 30.0
COOLDOWN_SECONDS: Final = 60.0
"""Before the same blocks are copied to the same node again: they may be evicted for a reason."""
COPY_SECONDS: Final = 10.0
"""A copy counts as running until its node tells of it, or that long."""
MAX_COPIED_BLOCKS: Final = 256
MAX_RUNNING: Final = 4
MAX_KEYS: Final = 65_536
MAX_REMEMBERED: Final = 1024
MAX_WINDOW_BLOCKS: Final = 8
MAX_WINDOW_BLOCKS_FAST: Final = 12
FAST_BYTES_PER_SECOND: Final = 10e9


class Copy(msgspec.Struct, frozen=True):
    """`keys` from the chain's head, from one node to another."""

    source: str
    destination: str
    keys: Sequence[bytes]


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A request that was placed: its keys, and what nodes hold of them in blocks."""

    keys: Sequence[bytes]
    held_blocks: dict[str, int]
    ordered: list[Priced]  # the chosen worker first


@dataclass(slots=True)
class Replication:
    """`decide` once a request; it remembers what was wanted and what was copied."""

    threshold: float = 1.25
    _now_wanted: dict[bytes, int] = field(default_factory=dict)
    _once_wanted: dict[bytes, int] = field(default_factory=dict)
    _window_began: float = 0.0
    _copied: dict[tuple[str, bytes], float] = field(default_factory=dict)  # to node, last key
    _running: dict[str, tuple[bytes, int, float]] = field(default_factory=dict)  # by destination

    def decide(self, placed: Placed, now: float) -> Copy | None:
        """A copy to make now, if any. Counts the request either way."""
        if not placed.held_blocks or not placed.ordered:
            return None
        source = max(placed.held_blocks, key=placed.held_blocks.__getitem__)
        best = placed.held_blocks[source]
        hot = self._count(placed.keys[:best], now)
        hot = min(hot, MAX_COPIED_BLOCKS)
        if not hot:
            return None
        destination = self._destination(placed, source, hot)
        if destination is None:
            return None
        return self._begin(Copy(source, destination, placed.keys[:hot]), now)

    def arrived(self, destination: str, blocks: int) -> None:
        """The node tells that it holds so many blocks of the chain being copied there."""
        running = self._running.get(destination)
        if running is not None and blocks >= running[1]:
            del self._running[destination]

    def check_integrity(self) -> None:
        assert len(self._running) <= MAX_RUNNING
        assert len(self._copied) <= MAX_REMEMBERED
        assert max(len(self._now_wanted), len(self._once_wanted)) <= MAX_KEYS + MAX_COPIED_BLOCKS

    def _count(self, keys: Sequence[bytes], now: float) -> int:
        """Length of the hot prefix; this request is counted. Heads are wanted most."""
        if now - self._window_began >= WINDOW_SECONDS or len(self._now_wanted) >= MAX_KEYS:
            fresh = now - self._window_began < 2 * WINDOW_SECONDS
            self._once_wanted = self._now_wanted if fresh else {}
            self._now_wanted, self._window_began = {}, now
        hot = 0
        for key in keys[:MAX_COPIED_BLOCKS]:
            count = self._now_wanted.get(key, 0) + 1
            self._now_wanted[key] = count
            hot += count + self._once_wanted.get(key, 0) >= HOT_REQUESTS
        return hot

    def _destination(self, placed: Placed, source: str, hot: int) -> str | None:
        chosen = placed.ordered[0]
        if self._lacks(placed, chosen.option.node_id, hot):
            return None if chosen.transfer_seconds else chosen.option.node_id
        if chosen.option.node_id != source or chosen.option.queue_seconds <= chosen.prefill_seconds:
            return None
        idlest = min(placed.ordered, key=lambda one: one.option.queue_seconds)
        node_id = idlest.option.node_id
        return node_id if self._lacks(placed, node_id, hot) else None

    def _lacks(self, placed: Placed, node_id: str, hot: int) -> bool:
        return is_far_behind(placed.held_blocks.get(node_id, 0), hot, self.threshold)

    def _begin(self, copy: Copy, now: float) -> Copy | None:
        self._running = {
            node: entry for node, entry in self._running.items() if now - entry[2] < COPY_SECONDS
        }
        mark = (copy.destination, copy.keys[-1])
        since = now - self._copied.get(mark, float("-inf"))
        is_running = copy.destination in self._running or len(self._running) >= MAX_RUNNING
        if is_running or since < COOLDOWN_SECONDS:
            return None
        self._copied[mark] = now
        if len(self._copied) > MAX_REMEMBERED:
            del self._copied[next(iter(self._copied))]
        self._running[copy.destination] = (copy.keys[-1], len(copy.keys), now)
        return copy


def prefetch_window(span_tokens: int, block_tokens: int, bytes_per_second: float) -> int:
    """Blocks to bring ahead with the urgency of a first token (R15); the rest goes in bulk."""
    most = MAX_WINDOW_BLOCKS
    if bytes_per_second >= FAST_BYTES_PER_SECOND:
        most = MAX_WINDOW_BLOCKS_FAST
    return max(1, min(span_tokens // (4 * block_tokens), most))
