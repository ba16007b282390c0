"""The control plane's JSON as this process reads and writes it.

Twins of the `schemas.py` in controlplane/ (a test compares them): decisions are written on the
request path, where pydantic would cost more than the rest of the request.
"""

from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from controlplane.core.handshake import HandshakeName
from controlplane.core.routing import DecodeCandidate, PrefillCandidate

HISTOGRAM_BOUNDS_SECONDS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip

# --- read ---


class ViewNode(msgspec.Struct, frozen=True):
    """A node with its agent."""

    id: str
    state: str = "ready"
    events_endpoint: str = ""
    block_tokens: int | None = None
    index_epoch: int = 0


class ViewWorker(msgspec.Struct, frozen=True):
    """An engine process."""

    id: str
    node_id: str
    role: Literal["prefill", "decode", "both"]
    model: str
    url: str
    state: str
    engine: Literal["vllm", "emulated"] = "vllm"
    namespace: str | None = None
    block_tokens: int | None = None
    max_concurrent_requests: int = 16
    handshake: HandshakeName = "perilune"
    bootstrap: str = ""
    engine_id: str = ""


class ViewModel(msgspec.Struct, frozen=True):
    """A model; `path` holds its tokenizer."""

    id: str
    path: str = ""
    max_model_len: int | None = None


class ViewPolicy(msgspec.Struct, frozen=True):
    """An active policy revision."""

    kind: str
    scope: str
    revision: int
    spec: dict[str, Any] = {}


class ViewKey(msgspec.Struct, frozen=True):
    """A client key, hashed."""

    key_sha256: str
    tenant: str
    max_priority: str = ""


class View(msgspec.Struct, frozen=True):
    """ClusterView."""

    revision: int = 0
    boot_id: str = ""
    cluster: str = ""
    nodes: list[ViewNode] = []
    workers: list[ViewWorker] = []
    models: list[ViewModel] = []
    policies: list[ViewPolicy] = []
    client_keys: list[ViewKey] = []


# --- written ---


class Phase(msgspec.Struct, omit_defaults=True, gc=False):
    """One bar of the waterfall."""

    name: str
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    start_seconds: float | None = None
    note: str = ""


class Leg(msgspec.Struct, gc=False):
    """What a worker's connector reported of its leg; several reports of one leg add up."""

    worker_id: str
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    pool_hit_tokens: int = 0
    computed_tokens: int = 0
    loaded_blocks: int = 0
    failed_blocks: int = 0
    stored_blocks: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    kv_wait_seconds: float = 0.0
    kv_wait_by_layer_seconds: list[float] = []
    kv_wait_by_stage_seconds: dict[str, float] = {}
    observed: Literal["layer", "stage"] = "stage"


class PromptRecord(msgspec.Struct, frozen=True, gc=False):
    """Block keys and token ids of a record's prompt, in base64."""

    namespace: str
    block_tokens: int
    num_tokens: int
    keys: str
    tokens: str | None = None


RequestStatus = Literal[
    "running", "finished_stop", "finished_length", "rejected", "failed", "cancelled"
]


class Verdict(msgspec.Struct, omit_defaults=True, gc=False):
    """What admission predicted of a request that it rejected, or let in as a probe."""

    gate: Literal["", "ttft", "tbt", "queue_full", "deadline"]
    predicted_seconds: float
    limit_seconds: float
    percentile: float = 0.0
    probe: bool = False
    measured_seconds: float | None = None
    met: bool | None = None


class ObservedPlacement(msgspec.Struct, frozen=True, gc=False):
    """What another algorithm would have done with the request."""

    algorithm: str
    worker_id: str
    predicted_ttft_seconds: float  # queue, transfer and prefill, as of the candidates


class Hedge(msgspec.Struct, omit_defaults=True, gc=False):
    """A second leg 1 that was sent beside a late one."""

    worker_id: str
    sent_after_seconds: float
    winner: Literal["", "first", "second"] = ""


class Decision(msgspec.Struct, omit_defaults=True, gc=False):
    """A decision record."""

    request_id: str
    at: datetime
    gateway_id: str
    status: RequestStatus
    client_request_id: str = ""
    transfer_id: str = ""
    tenant: str = "default"
    model: str = ""
    api: Literal["completions", "chat", "other"] = "completions"
    stream: bool = False
    emulated: bool = False
    policy_revisions: dict[str, int] = {}
    balancing_threshold: float | None = None
    normalised: list[str] = []
    prompt_tokens: int | None = None
    engine_prompt_tokens: int | None = None
    hit_tokens: int | None = None
    output_tokens: int | None = None
    prefill_candidates: list[PrefillCandidate] = []
    decode_candidates: list[DecodeCandidate] = []
    prefill_worker: str = ""
    decode_worker: str = ""
    predicted_ttft_seconds: float | None = None
    ttft_seconds: float | None = None
    tbt_p95_seconds: float | None = None
    e2e_seconds: float | None = None
    http_status: int | None = None
    error: str = ""
    failed_leg: Literal["", "prefill", "decode"] = ""
    retries: int = 0
    retry_after_seconds: float | None = None
    phases: list[Phase] = []
    prefill_leg: Leg | None = None
    decode_leg: Leg | None = None
    observed_placement: ObservedPlacement | None = None
    priority: str = ""
    dispatch_wait_seconds: float | None = None
    admission: Verdict | None = None
    sampled_one_in: int = 1
    hedge: Hedge | None = None
    route: str = ""
    request_bytes: int | None = None
    reply_bytes: int | None = None
    prompt: PromptRecord | None = None


class Histogram(msgspec.Struct):
    """Cumulative; one count a bound and one more."""

    counts: list[int]
    sum_seconds: float = 0.0


class WorkerLoad(msgspec.Struct):
    """This gateway's view of one worker."""

    running: int = 0
    waiting: int = 0
    requests_total: int = 0
    failures_total: int = 0
    queued_tokens: int = 0
    data_path: Literal["ok", "ejected", "trial"] = "ok"  # as its legs have met it lately
    data_path_note: str = ""
    prefill_samples: int = 0  # learned from, since the gateway's start
    prefill_error: float | None = None  # median of |predicted - actual| / actual, of the last 64
    tbt_samples: int = 0
    tbt_error: float | None = None
    failures_in_a_row: int = 0
    outcomes: int = 0  # of legs that it looks back on; 0: none of the last ones failed
    outcomes_failed: int = 0
    pause_seconds: float = 0.0  # of an ejected one, until its next trial


class GatewayStats(msgspec.Struct):
    """Counters since `started_at`, gauges as of now."""

    started_at: datetime
    ttft: Histogram
    tbt: Histogram
    queue: Histogram
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
    workers: dict[str, WorkerLoad] = {}
    index_blocks: int = 0
    rss_bytes: int = 0


class Report(msgspec.Struct):
    """GatewayReport. Decisions stand last: those of a report are encoded one by one."""

    url: str
    pid: int
    view_revision: int
    stats: GatewayStats
    decisions: list[Decision] = []
