"""Statistics: points of 1 s (one hour) and rollups of 10 s (one day)."""

from typing import Literal

from controlplane.schema_base import Schema

Metric = Literal[
    "requests", "rejected", "failed", "prompt_tokens", "hit_tokens", "output_tokens",
    "ttft_p50_seconds", "ttft_p95_seconds", "tbt_p50_seconds", "tbt_p95_seconds",
    "queue_p95_seconds", "slo_met", "slo_missed", "shed", "probes", "probes_met",
    "evicted_capacity", "evicted_quota", "evicted_ssd_capacity", "evicted_corrupt",
    "evicted_failed_write", "evicted_tier_lost", "evicted_purge", "evict_attempts",
    "evict_successes", "starved_by_pins", "wanted_again", "corrupt", "store_refused",
    "lookup_blocks", "lookup_hit_blocks", "pool_asked_tokens", "pool_hit_tokens", "promoted_blocks", "demoted_blocks",
    "ssd_read_bytes", "ssd_written_bytes", "dram_read_bytes", "dram_written_bytes",
    "ssd_used_bytes", "ssd_capacity_bytes", "claims_checked", "claims_stale",
    "stored_blocks", "loaded_blocks", "load_failed", "used_blocks", "capacity_blocks",
    "pinned_blocks", "write_queue_blocks", "moved_bytes", "running", "waiting",
    "kv_wait_seconds", "decode_seconds",
]  # fmt: skip
"""Counters are increments within the bucket (never negative: a restart is a gap); gauges are the
worst in the bucket; percentiles come from merged histograms. Unknown is null, not 0."""


class Series(Schema):
    """`values[i]` belongs to the bucket [start + i*step, start + (i+1)*step); null = no data.

    `source` is `cluster`, `node:ID`, `worker:ID`, `gateway:ID` or `pair:SRC>DST`.
    """

    metric: str
    source: str
    values: list[float | None]
    marks: list[str] = []  # per bucket: "" or "R" (counter reset)


class SeriesReply(Schema):
    """GET /api/v1/stats/series?metric=a,b&source=node:*&window=900&step=10."""

    start: float  # seconds since the epoch, aligned to the step
    step_seconds: float
    series: list[Series]


Path = Literal["shm", "tcp", "rdma"]
PATHS: tuple[Path, ...] = ("shm", "tcp", "rdma")


class Pair(Schema):
    """One cell of the transfer matrix: worker x worker with path shm, or node x node.

    `failures` of two nodes are pieces that did not come; `path` is what carried most bytes.
    """

    source: str
    destination: str
    path: Path
    kind: Literal["worker", "node"] = "worker"
    transfers: int
    bytes: int
    seconds: float
    failures: int = 0
    p50_seconds: float | None = None
    p95_seconds: float | None = None
    p99_seconds: float | None = None


class Matrix(Schema):
    """GET /api/v1/transfers/matrix?window=300."""

    window_seconds: float
    pairs: list[Pair]


class RoleSummary(Schema):
    """One line of Overview's role table."""

    role: str
    ready: int
    total: int
    running: int | None = None
    waiting: int | None = None
    queue_p95_seconds: float | None = None
    write_queue_blocks: int | None = None
    write_queue_bound: int | None = None


class Attention(Schema):
    """A line under NEEDS ATTENTION. `opens` is a console path such as `node/n1`."""

    severity: Literal["critical", "warn"]
    text: str
    since: float | None = None
    opens: str = ""


class Change(Schema):
    """A line under CHANGED IN THE LAST HOUR."""

    at: float
    text: str
    actor: str
    reason: str = ""


class Overview(Schema):
    """GET /api/v1/overview?window=900. Rates and ratios over `window_seconds`; null = unknown."""

    cluster: str
    at: float
    window_seconds: float
    emulated: bool = False
    sample_age_seconds: float | None = None
    requests_per_minute: float | None = None  # within the last 60 s, whatever the window
    rejected_ratio: float | None = None
    hit_ratio: float | None = None
    hit_tokens: int | None = None
    prompt_tokens: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    evictions_per_second: float | None = None
    moved_bytes_per_second: float | None = None
    ttft_p50_seconds: float | None = None
    ttft_p95_seconds: float | None = None
    tbt_p50_seconds: float | None = None
    tbt_p95_seconds: float | None = None
    slo_attainment_ratio: float | None = None
    slo_max_ttft_seconds: float | None = None
    slo_max_tbt_seconds: float | None = None
    slo_mode: str = "off"
    kv_wait_ratio: float | None = None
    tokenizer_mismatch_total: int = 0
    roles: list[RoleSummary] = []
    attention: list[Attention] = []
    changes: list[Change] = []
