"""The doctor: what nodes and pairs of nodes are like, against what they should be like."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from controlplane.schema_base import Id, Reason, Schema
from workers.core.doctor_messages import DEFAULT_PROBE_BYTES, MAX_PROBE_BYTES

CheckState = Literal["ok", "warn", "fail", "unknown"]


class DoctorCheck(Schema):
    """One verdict. `name` begins with its subject (`memlock`, `tcp.reach`, `rdma.port mlx5_0/1`).

    `what_to_do` is empty where nothing is to be done.
    """

    name: str
    state: CheckState
    value: str
    wanted: str = ""
    what_to_do: str = ""


class DoctorNode(Schema):
    """The checks of one node; those that failed first. `state`: the worst of them."""

    node_id: str
    state: CheckState
    checks: list[DoctorCheck]


class DoctorTransport(Schema):
    """What a probe measured. Null: it was not, or did not pass; `error` says why."""

    transport: str
    offered: bool
    latency_seconds: float | None = None
    bytes_per_second: float | None = None
    small_bytes: int = 0
    large_bytes: int = 0
    window_ops: int | None = None
    error: str = ""


class DoctorPair(Schema):
    """Blocks go from `source` to `destination`, which pulls them."""

    source: str
    destination: str
    state: CheckState
    checks: list[DoctorCheck]
    transports: list[DoctorTransport] = []
    control_seconds: float | None = None
    clock_offset_seconds: float | None = None  # the source's clock less the destination's


class DoctorBound(Schema):
    """What a pair must move for disaggregation to pay (workers.core.disaggregation)."""

    bytes_per_second: float
    kv_bytes_per_token: int
    tokens_per_second: float
    origin: Literal["measured", "given", "geometry"]
    prompt_tokens: int | None = None


class DoctorReport(Schema):
    """GET /api/v1/doctor: the last run, or the one under way (`done` of `total` answers are in).

    `number` counts runs of this control plane; 0 and `none`: there was none yet.
    """

    number: int = 0
    state: Literal["none", "running", "done", "failed"] = "none"
    error: str = ""
    actor: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None
    done: int = 0
    total: int = 0
    counts: dict[CheckState, int] = {}
    nodes: list[DoctorNode] = []
    pairs: list[DoctorPair] = []
    pairs_left_out: int = 0
    bound: DoctorBound | None = None


class DoctorRun(Schema):
    """Body of POST /api/v1/doctor. Without `node` and `pair`: all nodes and pairs.

    `pair`: "A:B", both ways. `prefill_tokens_per_second`, or `flops` that a prefill instance really
    reaches with prompts of `prompt_tokens`: where the bound shall not rest on measured prefills.
    """

    node: Id | None = None
    pair: Annotated[str, Field(pattern=r"^[^:\s]{1,128}:[^:\s]{1,128}$")] | None = None
    probe: bool = True
    max_bytes: Annotated[int, Field(ge=4096, le=MAX_PROBE_BYTES)] = DEFAULT_PROBE_BYTES
    prefill_tokens_per_second: Annotated[float, Field(gt=0, le=1e9)] | None = None
    flops: Annotated[float, Field(gt=0, le=1e21)] | None = None
    prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 8192
    reason: Reason = ""
