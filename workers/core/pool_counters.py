"""What the pool counts over one incarnation of its agent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

MAX_PAIRS: Final = 1024
OTHER_PAIR: Final = "other>other"


@dataclass(slots=True)
class PoolCounters:
    """Monotone. Names as in `PoolStats`.

    `evicted_by_cause` counts the blocks that left the index, by why; with `failed_write` also
    those that never were readable.
    """

    lookups_total: int = 0
    lookup_blocks_total: int = 0
    lookup_hit_blocks_total: int = 0
    stored_blocks_total: int = 0
    store_failed_total: int = 0
    store_refused_total: int = 0
    loaded_blocks_total: int = 0
    load_failed_total: int = 0
    evict_attempts_total: int = 0  # stores, quotas, trims, demotions ahead, room on disk
    evict_successes_total: int = 0  # of these, those that got all they asked for
    evicted_from_memory_total: int = 0
    demoted_blocks_total: int = 0
    promoted_blocks_total: int = 0
    dropped_undemoted_total: int = 0  # victims that left before a copy was on disk
    evicted_by_cause: Counter[str] = field(default_factory=Counter)
    starved_by_pins_total: int = 0
    corrupt_total: int = 0
    leases_expired_total: int = 0
    evicted_wanted_again_total: int = 0
    shm_bytes_by_pair: Counter[str] = field(default_factory=Counter)
    shm_seconds_by_pair: dict[str, float] = field(default_factory=dict)

    @property
    def evicted_blocks_total(self) -> int:
        return self.evicted_by_cause.total()

    def count_eviction(self, num_wanted: int, num_got: int) -> None:
        """One attempt to have so many blocks leave."""
        self.evict_attempts_total += 1
        self.evict_successes_total += num_got >= num_wanted

    def count_pair(self, source: str, destination: str, num_bytes: int, seconds: float) -> None:
        """One load's share from one source. Beyond `MAX_PAIRS` pairs, all count as one."""
        pair = f"{source}>{destination}"
        if pair not in self.shm_bytes_by_pair and len(self.shm_bytes_by_pair) >= MAX_PAIRS:
            pair = OTHER_PAIR
        self.shm_bytes_by_pair[pair] += num_bytes
        self.shm_seconds_by_pair[pair] = self.shm_seconds_by_pair.get(pair, 0.0) + seconds
