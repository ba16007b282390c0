"""Gateways: how they read the cluster and report to the control plane."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from controlplane.core.health import DataPathState
from controlplane.decisions.schemas import Decision
from controlplane.fleet.schemas import Worker
from controlplane.models.schemas import Model
from controlplane.nodes.schemas import Node
from controlplane.policies.schemas import PolicyRevision
from controlplane.schema_base import MAX_INTEGER, Page, Schema

HISTOGRAM_BOUNDS_SECONDS: tuple[float, ...] = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
"""Upper bounds of the latency buckets; one open bucket follows."""


class ClientKey(Schema):
    """A bearer key of /v1 as gateways know it: only its SHA-256."""

    key_sha256: str
    tenant: str
    max_priority: str = ""


class ClusterView(Schema):
    """GET /api/v1/view?gateway=ID&after=REV&wait=25: returns when `revision` > REV, or 304 after
    `wait` seconds. Asking with after=REV acknowledges REV: that gateway acts on it."""

    revision: int
    boot_id: str  # changes when the control plane restarts; revisions restart with it
    cluster: str
    nodes: list[Node]
    workers: list[Worker]
    models: list[Model]
    policies: list[PolicyRevision]  # the active ones
    client_keys: list[ClientKey] = []


class Histogram(Schema):
    """Cumulative since the gateway's start; `counts` has one entry more than the bounds."""

    counts: list[int]
    sum_seconds: float = 0.0


class WorkerLoad(Schema):
    """A gateway's view of one worker; counters cumulative since its start."""

    running: int = 0
    waiting: int = 0
    requests_total: int = 0
    failures_total: int = 0
    queued_tokens: int = 0
    data_path: DataPathState = "ok"  # as its legs have met it lately
    data_path_note: str = ""
    prefill_samples: int = 0  # learned from, since the gateway's start
    prefill_error: float | None = None  # median of |predicted - actual| / actual, of the last 64
    tbt_samples: int = 0
    tbt_error: float | None = None
    failures_in_a_row: int = 0
    outcomes: int = 0  # of legs that it looks back on; 0: none of the last ones failed
    outcomes_failed: int = 0
    pause_seconds: float = 0.0  # of an ejected one, until its next trial


class GatewayStats(Schema):
    """Counters cumulative since `started_at`; gauges as of now."""

    started_at: datetime
    requests_total: int = 0
    rejected_total: int = 0
    failed_total: int = 0
    cancelled_total: int = 0
    client_errors_total: int = 0
    in_flight: int = 0
    stuck: int = 0  # of those in flight: waiting beyond their bound
    prompt_tokens_total: int = 0
    hit_tokens_total: int = 0
    output_tokens_total: int = 0
    tokenizer_mismatch_total: int = 0
    slo_met_total: int = 0
    slo_missed_total: int = 0
    shed_total: int = 0
    probes_total: int = 0
    probes_met_total: int = 0
    decisions_dropped_total: int = 0
    prefetched_blocks_total: int = 0  # to decode nodes, when leg 1 went out
    replicated_blocks_total: int = 0  # hot ones, to nodes that lacked them
    ttft_error: float | None = None  # as a worker's errors
    transfer_error: float | None = None
    ttft: Histogram
    tbt: Histogram
    queue: Histogram
    workers: dict[str, WorkerLoad] = {}
    index_blocks: int = 0
    rss_bytes: int = 0


class GatewayReport(Schema):
    """Body of POST /api/v1/gateways/{id}/report, every 250 to 1000 ms."""

    url: Annotated[str, Field(max_length=2000)]
    pid: Annotated[int, Field(ge=0, le=MAX_INTEGER)]
    view_revision: Annotated[int, Field(ge=0, le=MAX_INTEGER)]
    stats: GatewayStats
    decisions: list[Decision] = Field(default=[], max_length=1000)


class Gateway(Schema):
    """A gateway as the control plane lists it."""

    id: str
    url: str
    pid: int
    state: str  # ready | stale | lost
    view_revision: int
    last_report_at: datetime
    age_seconds: float
    stats: GatewayStats | None = None


class GatewayList(Page):
    """GET /api/v1/gateways, by id."""

    items: list[Gateway]


class ReportReply(Schema):
    """The decisions of the report are stored; `view_revision` is the newest there is."""

    stored: int
    view_revision: int
