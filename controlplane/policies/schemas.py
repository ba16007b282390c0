"""Policies: immutable revisions; one active pointer per kind and scope."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from controlplane.schema_base import Page, Schema

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


class CacheSpec(Schema):
    """Pool settings that act on the running agents."""

    eviction: Literal["lru"] = "lru"
    store_generated: bool = False
    write_queue_blocks: Annotated[int, Field(ge=1, le=100_000)] = 500
    lease_seconds: Annotated[float, Field(ge=1, le=3600)] = 30.0


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

    revision: Annotated[int, Field(ge=1, strict=True)]
    reason: Annotated[str, Field(max_length=500)] = ""
