"""Hit rate at other capacities, from the live stream of keys, by spatial sampling.

A key is sampled if it lies below a threshold: always or never, so that the sample is the stream of
a smaller world. A block's reuse distance (distinct blocks used since its last use) among sampled
keys, divided by the sampled share, estimates the real one, and LRU of capacity C hits what has a
distance below C. A request uses its chain from tail to head, so a parent is never farther than its
child: what is hit is a prefix.

Two bounds: when more than `max_keys` are sampled the threshold falls; what is farther than any
capacity of the curve is forgotten. The sample rarely gets exactly its share of the uses, since a
few blocks (a system prompt) are used all the time: the difference is put down as uses at
distance 0, the SHARDS-adj correction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from math import log2
from typing import Final

from workers.core.ids import BlockHash
from workers.core.stats_messages import WhatIfPoint

FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
MAX_KEYS: Final = 8192
HALF_LIFE_SECONDS: Final = 1800.0
_HORIZON: Final = 1.1 * FACTORS[-1]
_MIN_USES: Final = 200.0
"""Uses that the sample must have seen before anything is said."""
_KEPT_SHARE: Final = 7 / 8
_FULL: Final = 1 << 64
_PER_OCTAVE: Final = 32
_NUM_BUCKETS: Final = 40 * _PER_OCTAVE


class WhatIf:
    """Takes about 300 bytes for each of `max_keys`, and well under a millisecond a request.

    What was seen counts half after `half_life_seconds`, so that the curve follows the traffic.
    """

    def __init__(
        self,
        capacity_blocks: int,
        *,
        max_keys: int = MAX_KEYS,
        half_life_seconds: float = HALF_LIFE_SECONDS,
    ) -> None:
        self.capacity_blocks = capacity_blocks
        self.max_keys = max_keys
        self._half_life = half_life_seconds
        self._halved_at: float | None = None
        self._threshold = _FULL
        self._below = b"\xff" * 64  # keys below this are sampled
        self._tick = 0
        self._last_use: OrderedDict[BlockHash, int] = OrderedDict()  # ticks, least recent first
        self._ticks: list[int] = []  # the same, ascending
        self._uses_at: list[float] = [0.0] * _NUM_BUCKETS  # by distance, of the sample
        self._uses_seen = 0.0  # of the sample
        self._uses_due = 0.0  # its share of all uses

    @property
    def sampled_share(self) -> float:
        return self._threshold / _FULL

    @property
    def num_keys(self) -> int:
        return len(self._last_use)

    def observe(self, keys: Sequence[BlockHash], now: float) -> None:
        """A request uses this chain, held or not, head first."""
        self._fade(now)
        share = self.sampled_share
        self._uses_due += share * len(keys)
        below = self._below
        sampled = [key for key in keys if key < below]
        if not sampled:
            return
        self._uses_seen += len(sampled)
        ticks, last_use = self._ticks, self._last_use
        lasts = [last_use.get(key) for key in sampled]
        for last in lasts:
            if last is not None:
                closer = len(ticks) - bisect_left(ticks, last) - 1
                self._uses_at[_bucket(closer / share)] += 1.0
        for key, last in zip(reversed(sampled), reversed(lasts), strict=True):
            if last is not None:
                del ticks[bisect_left(ticks, last)]
            self._tick += 1
            ticks.append(self._tick)
            last_use[key] = self._tick
            last_use.move_to_end(key)
        self._forget_the_far()
        if len(last_use) > self.max_keys:
            self._sample_less()

    def curve(self, capacity_blocks: int) -> list[WhatIfPoint]:
        """Hit rates in blocks at `FACTORS` of this capacity; None before enough was seen."""
        self.capacity_blocks = capacity_blocks
        return [
            WhatIfPoint(factor, int(factor * capacity_blocks), self.hit_rate(factor * capacity_blocks))
            for factor in FACTORS
        ]  # fmt: skip

    def hit_rate(self, capacity_blocks: float) -> float | None:
        if self._uses_due < _MIN_USES or capacity_blocks <= 0:
            return None
        at, part = divmod(_place(capacity_blocks), 1)
        bucket = min(int(at), _NUM_BUCKETS - 1)
        hits = sum(self._uses_at[:bucket]) + part * self._uses_at[bucket]
        hits += self._uses_due - self._uses_seen
        return min(1.0, max(0.0, hits / self._uses_due))

    # --- inside -----------------------------------------------------------------------------

    def _fade(self, now: float) -> None:
        if self._halved_at is None:
            self._halved_at = now
        elif now - self._halved_at >= self._half_life:
            self._halved_at = now
            self._scale(0.5)

    def _scale(self, factor: float) -> None:
        self._uses_at = [factor * uses for uses in self._uses_at]
        self._uses_seen *= factor
        self._uses_due *= factor

    def _forget_the_far(self) -> None:
        """Blocks that no capacity of the curve would hold are as good as never seen."""
        excess = len(self._ticks) - int(_HORIZON * self.capacity_blocks * self.sampled_share) - 1
        if excess > 0:
            for _ in range(excess):
                self._last_use.popitem(last=False)
            del self._ticks[:excess]

    def _sample_less(self) -> None:
        """Lower the threshold so that a part of the sampled keys lies above it."""
        keys = sorted(self._last_use)
        num_kept = int(self.max_keys * _KEPT_SHARE)
        limit = keys[num_kept]
        threshold = max(1, int.from_bytes(limit[:8].ljust(8, b"\0"), "big"))
        for key in keys[num_kept:]:
            del self._last_use[key]
        self._ticks = list(self._last_use.values())
        self._scale(threshold / self._threshold)
        self._threshold, self._below = threshold, limit


def _place(distance: float) -> float:
    return log2(1.0 + distance) * _PER_OCTAVE


def _bucket(distance: float) -> int:
    return min(int(_place(distance)), _NUM_BUCKETS - 1)
