"""Numbers of an agent, as `PoolStats`."""

from __future__ import annotations

from dataclasses import dataclass

from workers.agent.pool_host import PoolHost
from workers.agent.tier_stats import eviction_stats, group_stats, tier_stats, whatif_curve
from workers.core.messages import LegReport
from workers.core.pool_counters import PoolCounters
from workers.core.pool_views import num_pending
from workers.core.stats_messages import EvictionStats, NamespaceInfo, PoolStats, WorkerStatus


@dataclass(slots=True)
class LegCounters:
    """Sums over the leg reports of prefill legs: a prompt counts once, where it is read."""

    prompt_tokens_total: int = 0
    hit_tokens_total: int = 0

    def count(self, report: LegReport) -> None:
        if report.kv_role != "kv_consumer":
            self.prompt_tokens_total += report.prompt_tokens
            self.hit_tokens_total += report.device_hit_tokens + report.pool_hit_tokens


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What stands beside the pool's own numbers."""

    node_id: str
    incarnation: int
    uptime_seconds: float
    slab_bytes: int
    rss_bytes: int


def pool_stats(
    facts: AgentFacts,
    host: PoolHost,
    legs: LegCounters,
    namespaces: list[NamespaceInfo],
    workers: list[WorkerStatus],
) -> PoolStats:
    """All numbers as of now. Without a pool (no worker came yet) capacity is 0."""
    pool, limits = host.pool, host.limits
    counters = PoolCounters() if pool is None else pool.counters
    return PoolStats(
        node_id=facts.node_id,
        incarnation=facts.incarnation,
        uptime_seconds=facts.uptime_seconds,
        capacity_blocks=0 if pool is None else pool.slots.num_slots,
        used_blocks=0 if pool is None else pool.slots.num_slots - pool.slots.num_free,
        pinned_blocks=0 if pool is None else pool.num_pinned,
        pending_blocks=0 if pool is None else num_pending(pool),
        block_bytes=0 if pool is None else pool.block_bytes,
        slab_bytes=facts.slab_bytes,
        rss_bytes=facts.rss_bytes,
        write_queue_blocks=0 if pool is None else len(pool.writing),
        write_queue_bound=limits.write_queue_blocks,
        lookups_total=counters.lookups_total,
        lookup_blocks_total=counters.lookup_blocks_total,
        lookup_hit_blocks_total=counters.lookup_hit_blocks_total,
        prompt_tokens_total=legs.prompt_tokens_total,
        hit_tokens_total=legs.hit_tokens_total,
        stored_blocks_total=counters.stored_blocks_total,
        store_failed_total=counters.store_failed_total,
        store_refused_total=counters.store_refused_total,
        loaded_blocks_total=counters.loaded_blocks_total,
        load_failed_total=counters.load_failed_total,
        evict_attempts_total=counters.evict_attempts_total,
        evicted_blocks_total=counters.evicted_blocks_total,
        evicted_by_cause=dict(counters.evicted_by_cause),
        starved_by_pins_total=counters.starved_by_pins_total,
        corrupt_total=counters.corrupt_total,
        leases_expired_total=counters.leases_expired_total,
        shm_bytes_by_pair=dict(counters.shm_bytes_by_pair),
        shm_seconds_by_pair=dict(counters.shm_seconds_by_pair),
        evicted_wanted_again_total=counters.evicted_wanted_again_total,
        num_owners=0 if pool is None else len(pool.owners),
        tiers=tier_stats(pool, host.storage.tier_facts(), host.storage.numa_nodes),
        groups=[] if pool is None else group_stats(pool),
        eviction=EvictionStats() if pool is None else eviction_stats(pool),
        whatif=[] if pool is None else whatif_curve(pool),
        namespaces=namespaces,
        workers=workers,
    )
