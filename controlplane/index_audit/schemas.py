"""The index against the truth: how many of its claims about the nodes are wrong."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from controlplane.schema_base import Id, Page, Reason, Schema

Tier = Literal["dram", "ssd"]
AuditState = Literal["following", "resyncing", "unreachable"]
"""following: the node's events arrive; resyncing: a snapshot was asked for and has not come."""
DirectoryState = Literal["none", "rebuilding", "current", "lost", "read_only"]
"""rebuilding: not everything there has been read yet; lost: the store does not answer, the last
known view is in use; read_only: it takes no writes, serving goes on."""


class TierAudit(Schema):
    """Checks of claims that blocks lie in this tier; `stale_rate` over the last ones, null before
    the first."""

    tier: Tier
    checks_total: int
    stale_total: int
    recent_checks: int
    stale_rate: float | None


class NodeAudit(Schema):
    """One node. `blocks`: the claims that there are."""

    node_id: str
    state: AuditState
    incarnation: int | None = None
    sequence: int | None = None
    blocks: int
    blocks_on_ssd: int
    tiers: list[TierAudit]
    last_check_at: datetime | None = None
    last_stale_at: datetime | None = None
    last_stale_key: str | None = None  # hex
    resyncs_total: int
    last_error: str = ""


class DirectoryStatus(Schema):
    """The directory as this control plane sees it. Suspect nodes are registered no more and not
    yet given up."""

    state: DirectoryState
    reason: str = ""
    nodes: int = 0
    suspect_nodes: list[str] = []


class CacheAudit(Page):
    """GET /api/v1/cache/audit, by node."""

    items: list[NodeAudit]
    index_blocks: int
    index_entries: int
    index_dropped_total: int
    directory: DirectoryStatus


class CacheResync(Schema):
    """Body of POST /api/v1/cache/audit/resync. Without `key`: the node's claims are read anew, here
    and in every gateway. With one: it is compared with the node now, and what is wrong is dropped;
    gateways then read the node anew."""

    node_id: Id
    namespace: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    reason: Reason = ""

    @model_validator(mode="after")
    def _key_in_a_namespace(self) -> "CacheResync":
        if (self.key is None) != (self.namespace is None):
            raise ValueError("key and namespace belong together: give both or neither")
        return self


class ResyncResult(Schema):
    """What a resync found. `believed` and `found` tell of one key; null: not held."""

    node_id: str
    resync: bool  # a snapshot was asked for
    believed: Tier | None = None
    found: Tier | None = None
