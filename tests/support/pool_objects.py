"""A pool as the control plane reports it: two tiers a node, tenants with quotas, a curve; and jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from controlplane.jobs.schemas import Job
from controlplane.nodes.pool_schemas import (
    PoolCurvePoint,
    PoolGroup,
    PoolNamespace,
    PoolNode,
    PoolReport,
    PoolTier,
)

NOW = 1_796_130_450.0  # 2026-12-01 14:07:30 UTC, on a bucket's edge
AT = datetime.fromtimestamp(NOW, UTC)
GIB = 2**30


def make_tier(node: str, tier: str, **changes: object) -> PoolTier:
    used, capacity = (141, 160) if tier == "dram" else (612, 2000)
    values: dict[str, object] = {
        "node": node, "tier": tier, "state": "ok", "capacity_blocks": capacity * 32,
        "used_blocks": used * 32, "capacity_bytes": capacity * GIB, "used_bytes": used * GIB,
        "free_device_bytes": 900 * GIB if tier == "ssd" else None,
        "read_bytes_per_second": 2.1e9, "written_bytes_per_second": 8.4e8, "evicted_blocks_total": 4260,
    }  # fmt: skip
    return PoolTier.model_validate(values | changes)


def make_pool_node(node: str, **changes: object) -> PoolNode:
    health: dict[str, object] = {
        "node": node, "policy": "decay", "policy_revision": 17, "params": {"half_life_seconds": 600.0},
        "attempts": 4310, "successes": 4260, "starved_by_pins": 0, "evicted": 4260,
        "wanted_again": 264, "wanted_within_seconds": 300.0, "age_p50_seconds": 412.0,
        "age_p99_seconds": 3724.0, "pinned_bytes": 2 * GIB, "leased_bytes": 0, "promoted": 1204,
        "demoted": 3900, "corrupt": 0, "history_entries": 4260,
    }  # fmt: skip
    values: dict[str, object] = {
        "node": node, "state": "ready", "used_bytes": 141 * GIB, "capacity_bytes": 160 * GIB,
        "pinned_bytes": 2 * GIB, "block_bytes": 32 * 2**20, "write_queue_blocks": 118,
        "write_queue_bound": 500, "prompt_tokens": 900_000, "hit_tokens": 520_000,
        "claims_checked": 4100, "claims_stale": 3,
        "tiers": [make_tier(node, "dram"), make_tier(node, "ssd")],
    }  # fmt: skip
    eviction = health | dict(changes.pop("eviction", {}))  # type: ignore[call-overload]  # a dict
    return PoolNode.model_validate(values | {"eviction": eviction} | changes)


def make_group(kind: str, name: str, share: float, **changes: object) -> PoolGroup:
    values: dict[str, object] = {
        "kind": kind, "name": name, "nodes": 12, "used_blocks": int(5000 * share * 32),
        "used_bytes": int(5000 * share * GIB), "evicted_blocks_total": 311,
    }  # fmt: skip
    return PoolGroup.model_validate(values | changes)


def make_pool(nodes: int = 12, **changes: object) -> PoolReport:
    namespace = "4f09c1d2e3aa" + "0" * 52
    values: dict[str, object] = {
        "at": NOW,
        "window_seconds": 900.0,
        "nodes": [make_pool_node(f"node-{i:02d}") for i in range(1, nodes + 1)],
        "groups": [
            make_group("tenant", "acme", 0.55, quota_bytes=3000 * GIB, fullest=0.97),
            make_group("tenant", "default", 0.3),
            make_group("tenant", "batch", 0.1, quota_bytes=1000 * GIB, fullest=0.52, refused_blocks_total=7),
            make_group("namespace", namespace, 0.95, label="llama-8b"),
        ],
        "namespaces": [
            PoolNamespace(name=namespace, model="llama-8b", weights_version="w17", kv_dtype="bfloat16", block_tokens=256, block_bytes=32 * 2**20, nodes=["node-01", "node-02"], workers=["p1", "d1"]),
        ],
        "curve": [
            PoolCurvePoint(capacity_factor=f, capacity_bytes=int(f * 1920 * GIB), hit_rate=r)
            for f, r in ((0.25, 0.384), (0.5, 0.507), (1.0, 0.579), (2.0, 0.65), (4.0, 0.674))
        ],
        "measured_hit_rate": 0.581,
        "asked_tokens": 1_000_000,
        "claims_checked": 49_200,
        "claims_stale": 36,
    }  # fmt: skip
    return PoolReport.model_validate(values | changes)


def make_job(number: int, **changes: object) -> Job:
    values: dict[str, object] = {
        "id": number, "kind": "purge", "target": "batch", "spec": {"tenant": "batch"},
        "state": "running", "progress": {"done": 620, "total": 1000, "note": "node-07"},
        "attempts": 1, "created_at": AT - timedelta(minutes=1), "started_at": AT - timedelta(minutes=1),
        "author": "ana", "reason": "old runs",
    }  # fmt: skip
    return Job.model_validate(values | changes)
