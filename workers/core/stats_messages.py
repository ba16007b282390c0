"""What a node agent says of itself: its tiers, groups, eviction health, namespaces, workers.

Counters are cumulative over one incarnation; gauges are as of now. Unknown is None, not 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from workers.core.transfer_stats import TransferStats

TierName = Literal["dram", "ssd"]


class NamespaceSpec(msgspec.Struct, frozen=True):
    """Everything that must agree before one worker may read another's blocks."""

    model_id: str
    weights_version: str
    kv_dtype: str
    page_layout: str  # e.g. "LBHNC"
    isa: str  # e.g. "vec", "amx", "cuda"
    page_bytes: tuple[int, ...]  # bytes of one engine block, per layer, in layer order
    engine_block_tokens: int
    block_tokens: int  # pool block: a multiple of engine_block_tokens
    tp_size: int
    rank_layout: str  # e.g. "tp1"
    format_version: int = 1

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one pool block: all layers."""
        return sum(self.page_bytes) * (self.block_tokens // self.engine_block_tokens)


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker process as its supervisor sees it."""

    worker_id: str
    role: Literal["prefill", "decode", "both"]
    model: str
    url: str
    state: Literal["launching", "loading", "ready", "draining", "stopped", "failed"]
    pid: int = 0
    restarts: int = 0
    engine: Literal["vllm", "emulated"] = "vllm"
    started_at: float = 0.0  # seconds since the epoch
    last_error: str = ""
    log_file: str = ""
    rss_bytes: int = 0


class NamespaceInfo(msgspec.Struct, frozen=True):
    """A namespace that the node serves."""

    digest: bytes
    spec: NamespaceSpec
    workers: list[str] = []
    kv_tokens: dict[str, int] = {}  # by worker: tokens that fit into its engine, where it said


class TierStats(msgspec.Struct, frozen=True):
    """One tier of the pool. A block that lies in both tiers is counted in both."""

    tier: TierName
    capacity_blocks: int
    used_blocks: int
    capacity_bytes: int
    used_bytes: int
    free_device_bytes: int | None = None  # really free on the device under an SSD tier
    read_blocks_total: int = 0
    read_bytes_total: int = 0
    read_seconds_total: float = 0.0
    written_blocks_total: int = 0
    written_bytes_total: int = 0
    write_seconds_total: float = 0.0
    evicted_blocks_total: int = 0
    failed_reads_total: int = 0
    failed_writes_total: int = 0
    state: str = "ok"  # "ok", "rebuilding", "full", "off" or the error that stopped the tier
    path: str = ""
    numa_nodes: list[int] = []  # memory nodes that the tier is spread over; [] unknown


class GroupStats(msgspec.Struct, frozen=True):
    """What one tenant (a cache salt) or one namespace holds, over all tiers. `quota_bytes` None: no
    limit of its own."""

    kind: Literal["tenant", "namespace"]
    name: str  # the tenant's label, "default" without a salt; or the namespace's hex digest
    used_blocks: int
    used_bytes: int
    quota_bytes: int | None = None
    evicted_blocks_total: int = 0
    refused_blocks_total: int = 0


class EvictionStats(msgspec.Struct, frozen=True):
    """Is eviction healthy? Ages are of victims since their last use, in seconds."""

    policy: str = "lru"
    policy_revision: int = 0
    params: dict[str, float] = {}
    attempts_total: int = 0
    successes_total: int = 0
    pinned_bytes: int = 0  # kept from eviction by pins
    leased_bytes: int = 0  # of these, by owners whose lease has not been renewed since
    age_p50_seconds: float | None = None
    age_p99_seconds: float | None = None
    wanted_again_total: int = 0  # evicted, then wanted within `wanted_within_seconds`
    wanted_within_seconds: float = 300.0
    evicted_by_reason: dict[str, int] = {}  # "capacity", "quota", "ssd_capacity", ...
    history_entries: int = 0
    demoted_blocks_total: int | None = None  # left memory with a copy on SSD
    promoted_blocks_total: int | None = None  # came back from SSD into memory
    dropped_undemoted_blocks_total: int | None = None  # left the pool before a copy was on SSD


class WhatIfPoint(msgspec.Struct, frozen=True):
    """Predicted hit rate of the live key stream at `capacity_factor` times today's capacity."""

    capacity_factor: float
    capacity_blocks: int
    hit_rate: float | None


class PoolStats(msgspec.Struct, tag=True, frozen=True):
    """Counters are cumulative over one incarnation; gauges are as of now. Bytes, blocks, seconds.

    `hit_tokens_total / prompt_tokens_total` is the share of prompt tokens that prefill legs found in
    their device's cache or in the pool. Each prompt counts once, at its prefill leg: what leg 2 then
    loads is no second hit, and requests that skip the cache by design are in neither number.
    `lookup_*` count questions, not requests: they measure traffic and are no hit ratio.
    """

    node_id: str
    incarnation: int
    uptime_seconds: float
    capacity_blocks: int
    used_blocks: int
    pinned_blocks: int
    pending_blocks: int
    block_bytes: int
    slab_bytes: int
    rss_bytes: int  # the agent's resident memory without its slab
    write_queue_blocks: int
    write_queue_bound: int
    lookups_total: int = 0
    lookup_blocks_total: int = 0
    lookup_hit_blocks_total: int = 0
    prompt_tokens_total: int = 0  # from leg reports of producers
    hit_tokens_total: int = 0
    stored_blocks_total: int = 0
    store_failed_total: int = 0
    store_refused_total: int = 0
    loaded_blocks_total: int = 0
    load_failed_total: int = 0
    evict_attempts_total: int = 0
    evicted_blocks_total: int = 0
    evicted_by_cause: dict[str, int] = {}
    starved_by_pins_total: int = 0
    corrupt_total: int = 0
    leases_expired_total: int = 0
    endpoint: str = ""  # where other nodes' agents reach this one; "" = nowhere
    transfers: TransferStats = TransferStats()
    # Pulled from or pushed to other nodes by this one, over any transport. What its workers hand to one
    # another in the slab is not moved: `shm_bytes_by_pair`.
    moved_bytes_total: int = 0
    shm_bytes_by_pair: dict[str, int] = {}  # "p1>d1": bytes stored by p1 and loaded by d1
    shm_seconds_by_pair: dict[str, float] = {}
    evicted_wanted_again_total: int = 0
    num_owners: int = 0
    tiers: list[TierStats] = []  # nearest first: dram, then ssd where there is one
    groups: list[GroupStats] = []
    eviction: EvictionStats = EvictionStats()
    whatif: list[WhatIfPoint] = []
    namespaces: list[NamespaceInfo] = []
    workers: list[WorkerStatus] = []
