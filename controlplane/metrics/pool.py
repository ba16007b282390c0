"""Samples of the pool's tiers, eviction and groups. Labels: nodes, two tiers, and at most 51 groups
of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from controlplane.metrics.series import TIER
from controlplane.nodes.pool import curve_of
from controlplane.nodes.pool_groups import groups_of
from controlplane.plane import Plane
from controlplane.stats.bucket import Bucket, new_bucket
from workers.core.stats_messages import PoolStats, TierStats

Sample = tuple[str, Sequence[str], float]
COMPUTED = frozenset({"up", "free_device_bytes"})


def pool_values(plane: Plane) -> Iterator[Sample]:
    """One scrape; unknown has no sample."""
    heard = [node.stats for node in plane.nodes.live() if node.stats is not None]
    for stats in heard:
        for tier in stats.tiers:
            yield from _tier(stats.node_id, tier)
        if stats.tiers:
            yield from _eviction(stats)
    for group in groups_of(heard):
        yield "pool_group_used_bytes", (group.kind, group.name), group.used_bytes
        if group.quota_bytes is not None:
            yield "pool_group_quota_bytes", (group.kind, group.name), group.quota_bytes
    for point in curve_of([(stats, _lookups(stats)) for stats in heard]):
        if point.hit_rate is not None:
            yield "pool_what_if_hit_ratio", (f"{point.capacity_factor:g}",), point.hit_rate
    for node, (checked, stale) in plane.stats.collector.claims_total.items():
        yield "pool_claims_checked_total", (node,), checked
        yield "pool_claims_stale_total", (node,), stale
    jobs = Counter((job.kind, job.state) for job in plane.jobs.live.values())
    for (kind, state), count in jobs.items():
        yield "jobs", (kind, state), count


def _tier(node: str, tier: TierStats) -> Iterator[Sample]:
    labels = (node, tier.tier)
    yield "pool_tier_up", labels, float(tier.state == "ok")
    if tier.free_device_bytes is not None:
        yield "pool_tier_free_device_bytes", labels, tier.free_device_bytes
    for spec in TIER:
        field = spec.name.removeprefix("pool_tier_")
        if field not in COMPUTED:
            yield spec.name, labels, getattr(tier, field)


def _eviction(stats: PoolStats) -> Iterator[Sample]:
    node, health = (stats.node_id,), stats.eviction
    yield "pool_evict_successes_total", node, health.successes_total
    for field in ("demoted", "promoted", "dropped_undemoted"):
        count = getattr(health, f"{field}_blocks_total")
        if count is not None:
            yield f"pool_{field}_blocks_total", node, count
    yield "pool_pinned_bytes", node, health.pinned_bytes
    yield "pool_leased_bytes", node, health.leased_bytes
    yield "pool_eviction_history_entries", node, health.history_entries
    yield "pool_eviction_policy_revision", node, health.policy_revision
    yield "pool_eviction_policy", (*node, health.policy), 1.0
    for quantile, age in (("0.5", health.age_p50_seconds), ("0.99", health.age_p99_seconds)):
        if age is not None:
            yield "pool_eviction_age_seconds", (*node, quantile), age


def _lookups(stats: PoolStats) -> Bucket:
    """Each node's curve is weighed by all that it has looked up."""
    bucket = new_bucket()
    bucket.count({"lookup_blocks": float(stats.lookup_blocks_total)})
    return bucket
