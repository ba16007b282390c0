"""The pool's report from the nodes' last heartbeats and the window's rollups. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controlplane.nodes.pool_groups import groups_of
from controlplane.nodes.pool_schemas import (
    RATE_SECONDS,
    PoolCurvePoint,
    PoolEviction,
    PoolNamespace,
    PoolNode,
    PoolReport,
    PoolTier,
)
from controlplane.nodes.schemas import NodeState
from controlplane.stats.bucket import Bucket, new_bucket
from controlplane.stats.pool_values import EVICTION_CAUSES, NO_EVICTIONS
from workers.core.stats_messages import PoolStats, TierStats

MAX_NAMESPACES = 200


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is known of one node: its last statistics (null: none that count), the window's and
    the last minute's rollups, and how long of each it has been watched."""

    node: str
    state: NodeState
    stats: PoolStats | None
    window: Bucket
    minute: Bucket
    minute_seconds: float = RATE_SECONDS


def report(nodes: Sequence[NodeFacts], at: float, window_seconds: float) -> PoolReport:
    """Nodes in the order given; sums only over those that say something."""
    heard = [facts.stats for facts in nodes if facts.stats is not None]
    totals = _total(facts.window for facts in nodes if facts.stats is not None)
    asked = _count(totals, "pool_asked_tokens")
    found = totals.counters.get("pool_hit_tokens", 0.0)
    return PoolReport(
        at=at,
        window_seconds=window_seconds,
        nodes=[_node(facts) for facts in nodes],
        groups=groups_of(heard),
        namespaces=_namespaces(heard),
        curve=curve_of([(f.stats, f.window) for f in nodes if f.stats is not None]),
        measured_hit_rate=min(1.0, found / asked) if asked else None,
        asked_tokens=asked,
        claims_checked=_count(totals, "claims_checked"),
        claims_stale=_count(totals, "claims_stale"),
    )


def _node(facts: NodeFacts) -> PoolNode:
    stats, count = facts.stats, facts.window
    if stats is None:
        return PoolNode(node=facts.node, state=facts.state, eviction=PoolEviction(node=facts.node))
    return PoolNode(
        node=facts.node,
        state=facts.state,
        used_bytes=stats.used_blocks * stats.block_bytes,
        capacity_bytes=stats.capacity_blocks * stats.block_bytes,
        pinned_bytes=stats.pinned_blocks * stats.block_bytes,
        block_bytes=stats.block_bytes or None,
        write_queue_blocks=stats.write_queue_blocks,
        write_queue_bound=stats.write_queue_bound,
        prompt_tokens=_count(count, "prompt_tokens"),
        hit_tokens=_count(count, "hit_tokens"),
        claims_checked=_count(count, "claims_checked"),
        claims_stale=_count(count, "claims_stale"),
        tiers=[_tier(facts, tier) for tier in stats.tiers],
        eviction=_eviction(facts, stats),
    )


def _tier(facts: NodeFacts, tier: TierStats) -> PoolTier:
    return PoolTier(
        node=facts.node,
        tier=tier.tier,
        state=tier.state[:300],
        path=tier.path,
        capacity_blocks=tier.capacity_blocks,
        used_blocks=tier.used_blocks,
        capacity_bytes=tier.capacity_bytes,
        used_bytes=tier.used_bytes,
        free_device_bytes=tier.free_device_bytes,
        read_bytes_per_second=_rate(facts, f"{tier.tier}_read_bytes"),
        written_bytes_per_second=_rate(facts, f"{tier.tier}_written_bytes"),
        evicted_blocks_total=tier.evicted_blocks_total,
        failed_reads_total=tier.failed_reads_total,
        failed_writes_total=tier.failed_writes_total,
    )


def _eviction(facts: NodeFacts, stats: PoolStats) -> PoolEviction:
    """An agent without tiers' statistics does not say which policy it runs either."""
    count, health = facts.window, stats.eviction
    reasons = {
        cause: number
        for cause in EVICTION_CAUSES
        if (number := _count(count, f"evicted_{cause}")) is not None
    }
    evictions = [number for cause, number in reasons.items() if cause not in NO_EVICTIONS]
    numbers = PoolEviction(
        node=facts.node,
        attempts=_count(count, "evict_attempts"),
        successes=_count(count, "evict_successes"),
        starved_by_pins=_count(count, "starved_by_pins"),
        evicted=sum(evictions) if evictions else None,
        evicted_by_reason=reasons,
        wanted_again=_count(count, "wanted_again"),
        promoted=_count(count, "promoted_blocks"),
        demoted=_count(count, "demoted_blocks"),
        corrupt=_count(count, "corrupt"),
        pinned_bytes=stats.pinned_blocks * stats.block_bytes,
    )
    if not stats.tiers:
        return numbers
    return numbers.model_copy(
        update={
            "policy": health.policy,
            "policy_revision": health.policy_revision,
            "params": dict(health.params),
            "wanted_within_seconds": health.wanted_within_seconds,
            "age_p50_seconds": health.age_p50_seconds,
            "age_p99_seconds": health.age_p99_seconds,
            "pinned_bytes": health.pinned_bytes,
            "leased_bytes": health.leased_bytes,
            "history_entries": health.history_entries,
        }
    )


def _namespaces(heard: Sequence[PoolStats]) -> list[PoolNamespace]:
    found: dict[str, PoolNamespace] = {}
    for stats in heard:
        for info in stats.namespaces:
            name = info.digest.hex()
            if name not in found and len(found) >= MAX_NAMESPACES:
                continue
            row = found.setdefault(
                name,
                PoolNamespace(
                    name=name,
                    model=info.spec.model_id,
                    weights_version=info.spec.weights_version,
                    kv_dtype=info.spec.kv_dtype,
                    block_tokens=info.spec.block_tokens,
                    block_bytes=info.spec.block_bytes,
                    nodes=[],
                    workers=[],
                ),
            )
            row.nodes.append(stats.node_id)
            row.workers.extend(info.workers)
    return sorted(found.values(), key=lambda row: (row.model, row.name))


def curve_of(nodes: Sequence[tuple[PoolStats, Bucket]]) -> list[PoolCurvePoint]:
    """Over all nodes: capacities add up; hit rates are weighed by the buckets' `lookup_blocks`.
    A factor for which no node knows a rate has none."""
    factors = sorted({point.capacity_factor for stats, _ in nodes for point in stats.whatif})
    return [_curve_point(nodes, factor) for factor in factors]


def _curve_point(nodes: Sequence[tuple[PoolStats, Bucket]], factor: float) -> PoolCurvePoint:
    capacity, weights, hits = 0, 0.0, 0.0
    for stats, bucket in nodes:
        found = next((p for p in stats.whatif if p.capacity_factor == factor), None)
        if found is None:
            continue
        capacity += found.capacity_blocks * stats.block_bytes
        if found.hit_rate is not None:
            weight = 1.0 + bucket.counters.get("lookup_blocks", 0.0)
            weights += weight
            hits += weight * found.hit_rate
    rate = hits / weights if weights else None
    return PoolCurvePoint(capacity_factor=factor, capacity_bytes=capacity, hit_rate=rate)


def _total(buckets: Iterable[Bucket]) -> Bucket:
    total = new_bucket()
    for bucket in buckets:
        total.count(bucket.counters)
    return total


def _count(bucket: Bucket, metric: str) -> int | None:
    value = bucket.counters.get(metric)
    return None if value is None else int(value)


def _rate(facts: NodeFacts, metric: str) -> float | None:
    value: Mapping[str, float] = facts.minute.counters
    return None if metric not in value else value[metric] / max(1.0, facts.minute_seconds)
