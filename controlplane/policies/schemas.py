"""Policies: immutable revisions; one active pointer per kind and scope."""

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from controlplane.core.normalisation import Rule
from controlplane.core.placement import Algorithm
from controlplane.schema_base import MAX_INTEGER, Page, Schema
from workers.core.errors import ConfigError
from workers.core.policies.registry import DEFAULT_POLICY, check_policy
from workers.core.transfer_pacing import CAP_SHARE
from workers.core.transfer_policy import PAIR_PATTERN
from workers.core.transfer_types import SMALL_PIECE_BYTES

PolicyKind = Literal["slo", "scheduling", "cache", "admission", "transfer", "records"]
NODE_POLICIES: Final = frozenset({"cache", "transfer"})
"""Kinds that agents act on, by their heartbeats; gateways act on the others."""
SCOPE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/@+-]{0,127}$"
"""`default`, or a model by its name, which may have slashes; one with a colon goes by `default`."""
SLO_SCOPE_PATTERN = (
    r"^(tenant:[a-z0-9][a-z0-9._-]{0,63}(\+priority:[a-z0-9][a-z0-9_-]{0,31})?"
    r"|priority:[a-z0-9][a-z0-9_-]{0,31})$"
)
"""Of slo policies only: a tenant, a priority class, or a tenant's requests of one class. The first
that exists acts: tenant and class, tenant, class, model, default."""


class SloSpec(Schema):
    """Admission by predicted latency. `off`: no check; `observe`: log only; `enforce`: 429.

    `percentile` of the requests that are served are to keep the bounds: predictions are raised by
    how far they were off lately. What may still be turned away later, the wait for a turn at
    prefill, is judged by its median, and again by the percentile when the turn comes.
    """

    mode: Literal["off", "observe", "enforce"] = "observe"
    max_ttft_ms: Annotated[float, Field(ge=1, le=600_000)] = 10_000
    max_tbt_ms: Annotated[float, Field(ge=1, le=60_000)] = 500
    percentile: Annotated[float, Field(ge=50, le=99.9)] = 95
    retry_after_max_s: Annotated[int, Field(ge=1, le=600)] = 30


StuckSeconds = Annotated[float, Field(ge=1, le=86_400)]


class SchedulingSpec(Schema):
    """`placement` chooses prefill workers: `cost` is ours (queue + transfer + prefill, with a
    transfer only where it is quicker than computing, and `load_weight` times the work that others
    wait for); `mooncake`, `cache_aware`, `least_loaded` and `round_robin` are baselines. What the
    one that `observe` names would have done goes into the decision records. `explore_share` of
    requests, none of a gateway's first ones, try another worker than the best, where that costs
    little. `prefill_tflops` is what a
    worker reaches, for predictions before the first measurement.

    Requests that wait longer than `max_..._s` in a state are stuck: `watchdog` ends them, or only
    reports. `max_silence_s` is to a stream's first or next piece, `max_reply_s` of a plain reply.

    A prefill leg without an answer after `hedge_prefill_after_s` gets a second one beside it, where
    another worker is free (null: never); at most `hedge_max_share` of a model's requests.

    `normalisation` brings prompts to one form before both legs (none by default): line ends, blanks,
    system messages first. The decision record says which rules changed a prompt.
    """

    placement: Algorithm = "cost"
    observe: Algorithm | None = None
    balancing_threshold: Annotated[float, Field(ge=1, le=100)] = 1.25
    explore_share: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    load_weight: Annotated[float, Field(ge=0, le=100)] = 4.0
    prefill_tflops: Annotated[float | None, Field(ge=0.001, le=1_000_000)] = None
    max_concurrent_per_decode: Annotated[int, Field(ge=1, le=4096)] = 16
    normalisation: Annotated[list[Rule], Field(max_length=3)] = []
    hedge_prefill_after_s: Annotated[float | None, Field(ge=0.01, le=600)] = None
    hedge_max_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    watchdog: Literal["end", "report"] = "end"
    max_waiting_s: StuckSeconds = 120.0
    max_prefilling_s: StuckSeconds = 330.0
    max_handing_over_s: StuckSeconds = 30.0
    max_silence_s: StuckSeconds = 150.0
    max_reply_s: StuckSeconds = 3660.0


EvictionName = Literal["decay", "credit", "lru", "lfu", "lru2", "score", "class"]
ParamName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]
TenantName = Annotated[str, Field(min_length=1, max_length=256)]
NamespaceName = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MAX_GIB = 1_048_576
Gib = Annotated[float, Field(ge=0, le=MAX_GIB)]
_QUOTA = f"at most 1000 names, each with GiB from 0 to {MAX_GIB:,}"


class CacheSpec(Schema):
    """Pool settings that act on the running agents.

    `eviction_params` are checked against the policy that `eviction` names; what is left out has
    its default. Quotas are per node, over all tiers: by tenant ("default" for requests without a
    cache salt) and by namespace (hex digest); without one there is no limit but the pool's.
    `ssd_cap_gib` null: the agent's own cap holds.
    """

    eviction: EvictionName = DEFAULT_POLICY
    store_generated: bool = False
    write_queue_blocks: Annotated[int, Field(ge=1, le=100_000)] = 500
    lease_seconds: Annotated[float, Field(ge=1, le=3600)] = 30.0
    eviction_params: Annotated[
        dict[ParamName, float],
        Field(max_length=32, description="parameters of the eviction policy, each a number"),
    ] = {}
    pin_active_share: Annotated[float, Field(ge=0, le=0.5)] = 0.20
    pin_active_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 512
    tenant_quota_gib: Annotated[
        dict[TenantName, Gib], Field(max_length=1000, description=f"tenants, {_QUOTA}")
    ] = {}
    namespace_quota_gib: Annotated[
        dict[NamespaceName, Gib],
        Field(max_length=1000, description=f"namespaces (64 hex digits), {_QUOTA}"),
    ] = {}
    ssd_cap_gib: Annotated[float | None, Field(ge=0, le=MAX_GIB)] = None
    purge_replaced_weights: bool = True  # blocks of weights that were replaced and nobody serves

    @field_validator("eviction_params")
    @classmethod
    def _fits_the_policy(cls, params: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if "eviction" not in info.data:
            return params  # that field has its own error
        try:
            check_policy(info.data["eviction"], params)
        except ConfigError as error:
            name = error.field.removeprefix("eviction_params.")
            raise PydanticCustomError(
                "eviction_param", "{name} = {given}: {problem}",
                {
                    "name": name, "given": str(error.value), "problem": error.problem,
                    "way_out": error.way_out,
                },
            ) from error  # fmt: skip
        return params


ClassName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]


class AdmissionSpec(Schema):
    """Who goes first at a prefill worker, and who is turned away.

    `priorities`: classes, highest first. A key may claim classes up to its own; without keys any
    is accepted. Each gateway gives a worker `window_tokens` of uncached tokens and `window_ms` of
    predicted work at a time (one request always may go); the rest waits in the gateway, where it
    can still be overtaken and turned away: classes in strict order, in a class
    `hit_share` of the tokens to requests of which `hit_min_share` or more is cached, then tenants
    in turn by uncached tokens (`fairness`). `probe_share` of would-be rejections is let in, which
    tells how many rejections are wrong.
    """

    priorities: Annotated[list[ClassName], Field(min_length=1, max_length=8)] = [
        "interactive", "standard", "batch",
    ]  # fmt: skip
    default_priority: Annotated[ClassName, Field(validate_default=True)] = "standard"
    fairness: Literal["tenants", "none"] = "tenants"
    tenant_weights: Annotated[
        dict[TenantName, Annotated[float, Field(ge=0.01, le=1000)]],
        Field(max_length=1000, description="tenants, at most 1000, each with 0.01 to 1,000"),
    ] = {}
    quantum_tokens: Annotated[int, Field(ge=64, le=1_000_000)] = 2048
    window_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 8192
    window_ms: Annotated[float, Field(ge=1, le=600_000)] = 250
    hit_share: Annotated[float, Field(ge=0.05, le=0.95)] = 0.5
    hit_min_share: Annotated[float, Field(ge=0.01, le=1)] = 0.5
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] = 512
    max_wait_s: Annotated[float, Field(ge=0.1, le=600)] = 60
    probe_share: Annotated[float, Field(ge=0, le=0.5)] = 0.05

    @field_validator("priorities")
    @classmethod
    def _no_class_twice(cls, priorities: list[str]) -> list[str]:
        if len(set(priorities)) < len(priorities):
            raise PydanticCustomError("priorities", "a class stands here twice")
        return priorities

    @field_validator("default_priority")
    @classmethod
    def _is_a_class(cls, name: str, info: ValidationInfo) -> str:
        known = info.data.get("priorities")
        if known is not None and name not in known:
            raise PydanticCustomError(
                "default_priority", "must be one of {known}", {"known": ", ".join(known)}
            )
        return name


PairName = Annotated[str, Field(pattern=PAIR_PATTERN)]
Seconds = Annotated[float, Field(ge=0.05, le=600)]
Gbps = Annotated[float | None, Field(ge=0.0001, le=100_000)]


class TransferSpec(Schema):
    """Transfers between nodes; acts on the running agents, on what is under way too.

    `cap_gbps` caps each link between two nodes; null: `cap_share` of its bandwidth where
    `collectives_share_link`, else none. That bandwidth is `link_gbps`, or null: the best that
    transfers have shown. Pairs are named by the way of the bytes, "n1>n2". `mode`: blocks of a
    prefill leg are pulled by the decode node, pushed to it, or (auto) whichever took less of late.
    `piece_bytes` 0 moves blocks whole.
    """

    mode: Literal["auto", "pull", "push"] = "auto"
    collectives_share_link: bool = False
    cap_share: Annotated[float, Field(gt=0, le=1)] = CAP_SHARE
    cap_gbps: Gbps = None
    link_gbps: Gbps = None
    piece_bytes: Annotated[int, Field(ge=0, le=1_073_741_824)] = 0
    parallelism: Annotated[int, Field(ge=1, le=16)] = 2
    window_mib: Annotated[float, Field(ge=1, le=16_384)] = 64.0
    window_ops: Annotated[int, Field(ge=1, le=65_536)] = 256
    batch_share: Annotated[float, Field(ge=0.01, le=1)] = 0.5
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 4
    retry_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    retry_floor_mib: Annotated[float, Field(ge=1, le=16_384)] = 64.0
    connect_seconds: Seconds = 1.0
    stall_seconds: Seconds = 1.5
    fetch_seconds: Seconds = 10.0
    transport_overrides: Annotated[
        dict[PairName, Literal["shm", "tcp", "rdma"]],
        Field(
            max_length=1000, description='at most 1000 pairs "n1>n2", each with shm, tcp or rdma'
        ),
    ] = {}
    mode_overrides: Annotated[
        dict[PairName, Literal["pull", "push"]],
        Field(max_length=1000, description='at most 1000 pairs "n1>n2", each with pull or push'),
    ] = {}

    @field_validator("piece_bytes")
    @classmethod
    def _not_too_small(cls, value: int) -> int:
        if 0 < value < SMALL_PIECE_BYTES:
            raise PydanticCustomError(
                "piece_bytes", "pieces under {least} bytes cost more than they bring; 0 is whole blocks",
                {"least": SMALL_PIECE_BYTES},
            )  # fmt: skip
        return value


class RecordsSpec(Schema):
    """What is recorded of requests, and for how long.

    Of requests that ended well one in `sample_one_in` is recorded; of others, all. `prompts`: what
    is kept of their prompts beside the record, block keys or token ids too (ids are text).
    """

    sample_one_in: Annotated[int, Field(ge=1, le=100_000)] = 1
    prompts: Literal["none", "keys", "tokens"] = "keys"
    days: Annotated[int, Field(ge=1, le=365)] = 7
    max_records: Annotated[int, Field(ge=100, le=10_000_000)] = 50_000
    prompt_hours: Annotated[int, Field(ge=1, le=8_760)] = 24
    prompt_mib: Annotated[int, Field(ge=1, le=65_536)] = 256


PolicySpec = RecordsSpec | SloSpec | SchedulingSpec | CacheSpec | AdmissionSpec | TransferSpec
SPEC_OF_KIND: dict[str, type[PolicySpec]] = {
    "slo": SloSpec,
    "scheduling": SchedulingSpec,
    "cache": CacheSpec,
    "admission": AdmissionSpec,
    "transfer": TransferSpec,
    "records": RecordsSpec,
}


class PolicyRevision(Schema):
    """Never changes once written. ETag is the quoted revision, e.g. `"3"`."""

    kind: PolicyKind
    scope: str
    revision: int
    spec: dict[str, object]
    author: str
    reason: str = ""
    created_at: datetime
    active: bool = False


class PolicyPut(Schema):
    """Body of PUT /api/v1/policies/{kind}/{scope}: the whole spec, validated by its kind."""

    spec: dict[str, object]
    reason: Annotated[str, Field(max_length=500)] = ""


class PolicyPutReply(Schema):
    """`pending_gateways` did not acknowledge within 1 s; they take it when they are back."""

    active: PolicyRevision
    acknowledged_gateways: list[str] = []
    pending_gateways: list[str] = []


class PolicyList(Page):
    """GET /api/v1/policies (the active ones) and .../revisions (newest first)."""

    items: list[PolicyRevision]


class PolicyRevert(Schema):
    """Body of POST /api/v1/policies/{kind}/{scope}/revert: a new revision with the old spec."""

    revision: Annotated[int, Field(ge=1, le=MAX_INTEGER, strict=True)]
    reason: Annotated[str, Field(max_length=500)] = ""
