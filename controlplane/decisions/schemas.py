"""Decision records: why a request went where it went, and what came of it."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from controlplane.prompts.schemas import PromptRecord
from controlplane.schema_base import Page, Schema

RequestStatus = Literal[
    "running", "finished_stop", "finished_length", "rejected", "failed", "cancelled"
]


class PrefillCandidate(Schema):
    """The terms of R31 for one prefill worker; seconds and tokens."""

    worker_id: str
    node_id: str
    own_prefix_tokens: int
    used_prefix_tokens: int
    queue_seconds: float
    transfer_seconds: float
    prefill_seconds: float
    ttft_seconds: float
    verdict: str  # "chosen", "24 ms slower: queue", "breaks TTFT SLO by 310 ms", ...
    coming_prefix_tokens: int = 0  # of the own prefix: not stored yet, with prompts on their way


class DecodeCandidate(Schema):
    """Why a decode worker was or was not taken."""

    worker_id: str
    node_id: str
    running: int
    cap: int
    predicted_tbt_seconds: float | None = None
    verdict: str


class Phase(Schema):
    """One bar of the waterfall: admitted, queue, transfer, prefill, handover, first decode step."""

    name: str
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    start_seconds: float | None = None  # from arrival
    note: str = ""


class Leg(Schema):
    """What the worker's connector reported of its leg (workers.core.messages.LegReport)."""

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


class Verdict(Schema):
    """What admission predicted of a request that it rejected, or let in as a probe: the value at
    the SLO's percentile and its limit, and what was measured of a probe. `gate` says what turned it
    away: a prediction (ttft, tbt), a full queue, or a wait in it up to the SLO's deadline."""

    gate: Literal["", "ttft", "tbt", "queue_full", "deadline"]
    predicted_seconds: float
    limit_seconds: float
    percentile: float = 0.0
    probe: bool = False
    measured_seconds: float | None = None
    met: bool | None = None  # null: not known


class ObservedPlacement(Schema):
    """What another algorithm would have done with the request."""

    algorithm: str
    worker_id: str
    predicted_ttft_seconds: float  # queue, transfer and prefill, as of the candidates


class Hedge(Schema):
    """A second leg 1 that was sent beside a late one; `winner` says whose answer was taken."""

    worker_id: str
    sent_after_seconds: float
    winner: Literal["", "first", "second"] = ""


class Decision(Schema):
    """One request. A running one is sent again, whole, when it ends: the later record wins."""

    request_id: str  # ours, unique
    client_request_id: str = ""
    transfer_id: str = ""
    at: datetime
    gateway_id: str
    tenant: str = "default"
    model: str = ""
    api: Literal["completions", "chat", "other"] = "completions"
    stream: bool = False
    status: RequestStatus
    emulated: bool = False
    policy_revisions: dict[str, int] = {}  # "slo/default": 3
    balancing_threshold: float | None = None
    normalised: list[str] = []  # rules of the policy that changed the prompt
    prompt_tokens: int | None = None
    engine_prompt_tokens: int | None = None  # as the prefill leg counted; differs = counted
    hit_tokens: int | None = None  # device + pool hits of the prefill leg
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
    observed_placement: ObservedPlacement | None = None  # where the scheduling policy observes
    priority: str = ""  # class by which it waited
    dispatch_wait_seconds: float | None = None  # for its turn at the prefill worker; null: none
    admission: Verdict | None = None  # null where the prediction kept the SLO
    sampled_one_in: int = 1  # of requests like this one, so many are recorded as one
    hedge: Hedge | None = None
    route: str = ""  # of those that are not split: "/v1/embeddings"
    request_bytes: int | None = None  # bodies of requests that any one worker answers
    reply_bytes: int | None = None
    prompt: PromptRecord | None = None  # on its way in only: GET /decisions/{id}/prompt has it


class DecisionList(Page):
    """GET /api/v1/decisions, newest first."""

    items: list[Decision]


class DecisionBatch(Schema):
    """Part of a gateway's report."""

    items: list[Decision] = Field(default=[], max_length=1000)
