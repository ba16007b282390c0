"""Policies: immutable revisions; one active pointer per kind and scope."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from controlplane.schema_base import MAX_INTEGER, Page, Schema
from workers.core.errors import ConfigError
from workers.core.policies.registry import DEFAULT_POLICY, check_policy

PolicyKind = Literal["slo", "scheduling", "cache"]


class SloSpec(Schema):
    """Admission by predicted latency. `off`: no check; `observe`: log only; `enforce`: 429."""

    mode: Literal["off", "observe", "enforce"] = "observe"
    max_ttft_ms: Annotated[float, Field(ge=1, le=600_000)] = 10_000
    max_tbt_ms: Annotated[float, Field(ge=1, le=60_000)] = 500
    percentile: Annotated[float, Field(ge=50, le=99.9)] = 95
    retry_after_max_s: Annotated[int, Field(ge=1, le=600)] = 30


class SchedulingSpec(Schema):
    """`cost` is R31 (queue + transfer + prefill); `round_robin` the baseline."""

    placement: Literal["cost", "round_robin"] = "cost"
    balancing_threshold: Annotated[float, Field(ge=1, le=100)] = 1.25
    max_concurrent_per_decode: Annotated[int, Field(ge=1, le=4096)] = 16


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


PolicySpec = SloSpec | SchedulingSpec | CacheSpec
SPEC_OF_KIND: dict[str, type[SloSpec] | type[SchedulingSpec] | type[CacheSpec]] = {
    "slo": SloSpec,
    "scheduling": SchedulingSpec,
    "cache": CacheSpec,
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
