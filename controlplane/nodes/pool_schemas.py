"""The KV pool in full: tiers, tenants, namespaces, health of eviction, the what-if curve."""

from typing import Literal

from controlplane.nodes.schemas import NodeState
from controlplane.schema_base import Schema

RATE_SECONDS = 60.0
"""Rates (`..._per_second`) are means of the last minute, whatever the window."""


class PoolTier(Schema):
    """One tier of one node. A block in both tiers counts in both. Unknown is null."""

    node: str
    tier: str  # dram or ssd
    state: str  # ok, rebuilding, full, off, or the error that stopped it
    path: str = ""
    capacity_blocks: int
    used_blocks: int
    capacity_bytes: int
    used_bytes: int
    free_device_bytes: int | None = None
    read_bytes_per_second: float | None = None
    written_bytes_per_second: float | None = None
    evicted_blocks_total: int = 0
    failed_reads_total: int = 0
    failed_writes_total: int = 0


class PoolGroup(Schema):
    """A tenant or namespace over all nodes; `others` of them in one row beyond the largest.

    `quota_bytes` is the sum over the nodes that hold it; null: no limit of its own.
    `fullest` is the largest share of its quota that it fills on any node: eviction acts by node.
    """

    kind: Literal["tenant", "namespace"]
    name: str  # tenant's label, or the namespace's hex digest
    label: str = ""  # what people call it: the model of a namespace
    nodes: int = 0
    others: int = 0
    used_blocks: int
    used_bytes: int
    quota_bytes: int | None = None
    fullest: float | None = None
    evicted_blocks_total: int = 0
    refused_blocks_total: int = 0


class PoolEviction(Schema):
    """Health of one node's eviction. Counts within the window; ages are of victims since their
    last use. `wanted_again`: evicted blocks that were asked for within `wanted_within_seconds`."""

    node: str
    policy: str | None = None
    policy_revision: int | None = None
    params: dict[str, float] = {}
    attempts: int | None = None
    successes: int | None = None
    starved_by_pins: int | None = None
    evicted: int | None = None
    evicted_by_reason: dict[str, int] = {}
    wanted_again: int | None = None
    wanted_within_seconds: float | None = None
    age_p50_seconds: float | None = None
    age_p99_seconds: float | None = None
    pinned_bytes: int | None = None
    leased_bytes: int | None = None
    promoted: int | None = None
    demoted: int | None = None
    corrupt: int | None = None
    history_entries: int | None = None


class PoolNode(Schema):
    """One node's pool. Of a node that is not heard of, nothing is known."""

    node: str
    state: NodeState
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    pinned_bytes: int | None = None
    block_bytes: int | None = None
    write_queue_blocks: int | None = None
    write_queue_bound: int | None = None
    prompt_tokens: int | None = None  # within the window
    hit_tokens: int | None = None
    claims_checked: int | None = None
    claims_stale: int | None = None
    tiers: list[PoolTier] = []
    eviction: PoolEviction


class PoolNamespace(Schema):
    """What must agree before one worker may read another's blocks, and who serves it now."""

    name: str  # hex digest
    model: str
    weights_version: str
    kv_dtype: str
    block_tokens: int
    block_bytes: int
    nodes: list[str]
    workers: list[str]  # none: nobody can use these blocks now


class PoolCurvePoint(Schema):
    """Hit rate of the live key stream, predicted for so much capacity; null: not enough keys."""

    capacity_factor: float
    capacity_bytes: int
    hit_rate: float | None


class PoolReport(Schema):
    """GET /api/v1/cache/pool?window=900. `curve` is over all nodes, each weighed by its lookups;
    `measured_hit_rate`, of today: prompt tokens that prefill found in the pool / those that it asked
    the pool for (not those that its device's cache had), within the window."""

    at: float
    window_seconds: float
    rate_seconds: float = RATE_SECONDS
    nodes: list[PoolNode]
    groups: list[PoolGroup] = []
    namespaces: list[PoolNamespace] = []
    curve: list[PoolCurvePoint] = []
    measured_hit_rate: float | None = None
    asked_tokens: int | None = None
    claims_checked: int | None = None
    claims_stale: int | None = None
