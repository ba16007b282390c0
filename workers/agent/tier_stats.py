"""Numbers of the pool's tiers, groups and eviction, for `PoolStats`."""

from __future__ import annotations

from msgspec.structs import replace

from workers.core.pool_state import PoolState
from workers.core.quotas import Group
from workers.core.stats_messages import EvictionStats, GroupStats, TierStats, WhatIfPoint
from workers.pool.tier import TierFacts


def tier_stats(
    pool: PoolState | None, ssd: TierFacts | None, numa_nodes: list[int]
) -> list[TierStats]:
    """Nearest first. Without a pool there is none."""
    if pool is None:
        return []
    dram = _dram(pool, numa_nodes)
    return [dram] if ssd is None else [dram, _ssd(pool, ssd)]


def _dram(pool: PoolState, numa_nodes: list[int]) -> TierStats:
    counters, each = pool.counters, pool.block_bytes
    written = counters.stored_blocks_total + counters.promoted_blocks_total
    return TierStats(
        tier="dram",
        capacity_blocks=pool.slots.num_slots,
        used_blocks=pool.slots.num_used,
        capacity_bytes=pool.slots.num_slots * each,
        used_bytes=pool.slots.num_used * each,
        read_blocks_total=counters.loaded_blocks_total,
        read_bytes_total=counters.loaded_blocks_total * each,
        written_blocks_total=written,
        written_bytes_total=written * each,
        evicted_blocks_total=counters.evicted_from_memory_total,
        failed_reads_total=counters.load_failed_total,
        failed_writes_total=counters.store_failed_total,
        numa_nodes=numa_nodes,
    )


def _ssd(pool: PoolState, facts: TierFacts) -> TierStats:
    disk, each = pool.disk, pool.block_bytes
    counters = disk.counters
    capacity = disk.slots.num_slots
    if disk.cap_blocks is not None:
        capacity = min(capacity, disk.cap_blocks)
    return TierStats(
        tier="ssd",
        capacity_blocks=capacity,
        used_blocks=disk.slots.num_used,
        capacity_bytes=capacity * each,
        used_bytes=disk.slots.num_used * each,
        free_device_bytes=facts.free_device_bytes,
        read_blocks_total=counters.read_blocks_total,
        read_bytes_total=counters.read_blocks_total * each,
        read_seconds_total=counters.read_seconds_total,
        written_blocks_total=counters.written_blocks_total,
        written_bytes_total=counters.written_blocks_total * each,
        write_seconds_total=counters.write_seconds_total,
        evicted_blocks_total=counters.evicted_blocks_total,
        failed_reads_total=counters.failed_reads_total,
        failed_writes_total=counters.failed_writes_total,
        state=facts.state if disk.takes_writes or facts.state != "ok" else "full",
        path=facts.path,
    )


def group_stats(pool: PoolState) -> list[GroupStats]:
    return [_group(group, pool.block_bytes) for group in pool.groups.all()]


def _group(group: Group, block_bytes: int) -> GroupStats:
    quota = group.quota_blocks
    return GroupStats(
        kind=group.kind,
        name=group.name or "default",
        used_blocks=group.used_blocks,
        used_bytes=group.used_blocks * block_bytes,
        quota_bytes=None if quota is None else quota * block_bytes,
        evicted_blocks_total=group.evicted_blocks_total,
        refused_blocks_total=group.refused_blocks_total,
    )


def eviction_stats(pool: PoolState) -> EvictionStats:
    counters, policy = pool.counters, pool.policy.policy
    leased = {block for o in pool.owners.all() if not o.renewed for block in o.pins}
    health = pool.history.health(
        dict(policy.params),
        attempts=counters.evict_attempts_total,
        successes=counters.evict_successes_total,
        pinned_bytes=pool.num_pinned * pool.block_bytes,
        leased_bytes=len(leased) * pool.block_bytes,
    )
    return replace(
        health,
        demoted_blocks_total=counters.demoted_blocks_total,
        promoted_blocks_total=counters.promoted_blocks_total,
        dropped_undemoted_blocks_total=counters.dropped_undemoted_total,
    )


def whatif_curve(pool: PoolState) -> list[WhatIfPoint]:
    """At shares and multiples of today's capacity, both tiers together."""
    return pool.whatif.curve(pool.capacity_blocks)
