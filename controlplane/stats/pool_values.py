"""A node's statistics as counters and gauges by metric. Pure. What its agent does not say is left
out, so that it stays unknown instead of 0."""

from __future__ import annotations

from typing import Final

from workers.core.stats_messages import PoolStats, TierStats

ALWAYS: Final = (
    "prompt_tokens", "hit_tokens", "evict_attempts", "stored_blocks", "loaded_blocks", "load_failed",
    "moved_bytes", "lookup_blocks", "lookup_hit_blocks", "starved_by_pins", "corrupt",
    "store_refused",
)  # fmt: skip
EVICTION_CAUSES: Final = (
    "capacity", "quota", "ssd_capacity", "corrupt", "failed_write", "tier_lost", "purge",
)  # fmt: skip
"""Why a block left. A purge is an operator's; it is counted, but it is no eviction."""
NO_EVICTIONS: Final = frozenset({"purge"})
GAUGES: Final = ("used_blocks", "capacity_blocks", "pinned_blocks", "write_queue_blocks")
QUIET: Final = frozenset({
    "lookup_blocks", "lookup_hit_blocks", "corrupt", "store_refused", "evict_successes",
    "wanted_again", "promoted_blocks", "demoted_blocks", "ssd_read_bytes", "ssd_written_bytes",
    "dram_read_bytes", "dram_written_bytes", "ssd_used_bytes", "ssd_capacity_bytes",
    "evicted_purge", "claims_checked", "pool_asked_tokens", "pool_hit_tokens",
})  # fmt: skip
"""Kept and served as series, but not sent with each tick: pages read them when they show them."""


def counters_of(stats: PoolStats) -> dict[str, float]:
    """Cumulative, of this incarnation."""
    values = {name: float(getattr(stats, f"{name}_total")) for name in ALWAYS}
    values |= {f"evicted_{cause}": float(count) for cause, count in causes_of(stats).items()}
    values["wanted_again"] = float(
        max(stats.evicted_wanted_again_total, stats.eviction.wanted_again_total)
    )
    if stats.tiers:  # such an agent says all of this; an older one says nothing of it
        values["evict_successes"] = float(stats.eviction.successes_total)
    for tier in stats.tiers:
        values |= _tier_counters(tier)
    return values | _moves(stats)


def causes_of(stats: PoolStats) -> dict[str, int]:
    """Blocks that left by cause; 0 for a known cause that never was."""
    found = dict.fromkeys(EVICTION_CAUSES, 0)
    for cause, count in stats.eviction.evicted_by_reason.items():
        if cause in found:
            found[cause] = count
    for cause, count in stats.evicted_by_cause.items():
        if cause in found:
            found[cause] = max(found[cause], count)
    return found


def gauges_of(stats: PoolStats) -> dict[str, float]:
    """As of now."""
    values = {name: float(getattr(stats, name)) for name in GAUGES}
    ssd = tier_of(stats, "ssd")
    if ssd is not None:
        values["ssd_used_bytes"] = float(ssd.used_bytes)
        values["ssd_capacity_bytes"] = float(ssd.capacity_bytes)
    return values


def tier_of(stats: PoolStats, name: str) -> TierStats | None:
    return next((tier for tier in stats.tiers if tier.tier == name), None)


def _moves(stats: PoolStats) -> dict[str, float]:
    """Between memory and SSD. An older agent says only what the disk read and wrote: that is more
    than what moved by reads that failed and by copies whose blocks stayed."""
    ssd, health = tier_of(stats, "ssd"), stats.eviction
    if ssd is None:
        return {}
    promoted, demoted = health.promoted_blocks_total, health.demoted_blocks_total
    return {
        "promoted_blocks": float(ssd.read_blocks_total if promoted is None else promoted),
        "demoted_blocks": float(ssd.written_blocks_total if demoted is None else demoted),
    }


def _tier_counters(tier: TierStats) -> dict[str, float]:
    return {
        f"{tier.tier}_read_bytes": float(tier.read_bytes_total),
        f"{tier.tier}_written_bytes": float(tier.written_bytes_total),
    }
