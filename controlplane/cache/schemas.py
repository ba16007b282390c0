"""Cache operations: what the pool holds, and what an operator may do to it."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from controlplane.jobs.schemas import Job
from controlplane.nodes.schemas import NodeState
from controlplane.schema_base import Id, Page, Reason, Schema

NamespaceName = Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
"""Hex digest of a namespace, or its first 8 digits and more where they name one only."""
Tenant = Annotated[str, Field(min_length=1, max_length=512)]
"""The cache salt; `default` stands for those without one."""
BlockKey = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""Hex of a block's 16 bytes: it names the chain from its head to that block."""
PinName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Hottest = Annotated[int, Field(ge=1, le=1000)]
MAX_PIN_SECONDS = 366 * 86_400


class Selected(Schema):
    """Which blocks: all that is given must match. Without `node`: on every node."""

    node: Id | None = None
    namespace: NamespaceName | None = None
    tenant: Tenant | None = None
    key: BlockKey | None = None
    reason: Reason = ""


class CachePin(Selected):
    """Body of POST /api/v1/cache/pin: keep from eviction. With a key: the blocks from the head to
    it. `max_share` bounds what operators' pins hold of a node's pool, all together."""

    name: PinName | None = None  # by default pin-<job>
    for_seconds: Annotated[float, Field(ge=1, le=MAX_PIN_SECONDS)] | None = None  # null: for good
    max_share: Annotated[float, Field(gt=0, le=0.5)] = 0.2

    @model_validator(mode="after")
    def _names_blocks(self) -> "CachePin":
        _need(self, ("namespace", "tenant", "key"))
        return self


class CacheUnpin(Selected):
    """Body of POST /api/v1/cache/unpin: end one pin by its name, or those that hold a block of a
    selection."""

    name: PinName | None = None

    @model_validator(mode="after")
    def _names_pins(self) -> "CacheUnpin":
        _need(self, ("name", "namespace", "tenant", "key"))
        return self


class CachePurge(Selected):
    """Body of POST /api/v1/cache/purge. It cannot be undone: where more than one chain goes,
    `confirm` must repeat the target's name, which the refusal says."""

    confirm: Annotated[str, Field(max_length=300)] = ""
    include_pinned: bool = False  # operators' pins on these blocks end too

    @model_validator(mode="after")
    def _names_blocks(self) -> "CachePurge":
        _need(self, ("node", "namespace", "tenant", "key"))
        return self


class CachePrefetch(Selected):
    """Body of POST /api/v1/cache/prefetch: from SSD into memory. Without a key the hottest chains
    of the selection."""

    hottest: Hottest = 10

    @model_validator(mode="after")
    def _names_blocks(self) -> "CachePrefetch":
        _need(self, ("namespace", "tenant", "key"))
        return self


class CacheReplicate(Schema):
    """Body of POST /api/v1/cache/replicate: copy chains from one node to another. Without a key
    the hottest of the selection."""

    source: Id
    destination: Id
    namespace: NamespaceName | None = None
    tenant: Tenant | None = None
    key: BlockKey | None = None
    hottest: Hottest = 10
    mib_per_second: Annotated[float, Field(gt=0, le=100_000)] = 256
    reason: Reason = ""

    @model_validator(mode="after")
    def _is_a_copy(self) -> "CacheReplicate":
        _need(self, ("namespace", "tenant", "key"))
        if self.source == self.destination:
            expected = "two different nodes"
            problem = "Source and destination are one node"
            raise PydanticCustomError("one_node", problem, {"expected": expected})
        return self


class CacheChain(Schema):
    """One chain on one node, from its head to a block without children. Unknown is null."""

    node: str
    namespace: str
    tenant: str
    head: str
    key: str  # its last block: what pin, purge and the others take
    blocks: int
    tokens: int | None = None
    bytes: int | None = None
    blocks_on_disk: int
    tier: Literal["dram", "ssd", "both"]
    pins: int  # owners that keep its last block now: requests, transfers, operators
    pinned_by: list[str] = []
    hits: int | None = None
    idle_seconds: float | None = None


class CacheChainList(Page):
    """GET /api/v1/cache/chains. A page may be short before the end: `next_cursor` goes on.

    `complete` false: time ran out, or a node of `unreachable` (with the reason) is missing.
    """

    items: list[CacheChain]
    complete: bool = True
    unreachable: dict[str, str] = {}


class CachePinned(Schema):
    """An operator's pin on one node."""

    name: str
    node: str
    blocks: int
    bytes: int | None = None
    share: float | None = None  # of the node's pool
    expires_at: datetime | None = None
    keys: list[str] = []  # ends of its chains, the first few
    chains: int | None = None  # null: too many to count


class CachePinList(Page):
    """GET /api/v1/cache/pins."""

    items: list[CachePinned]
    unreachable: dict[str, str] = {}


class CacheTier(Schema):
    """One tier of one node, as its last heartbeat said. Counters are of this incarnation."""

    tier: str
    state: str
    capacity_blocks: int
    used_blocks: int
    capacity_bytes: int
    used_bytes: int
    evicted_blocks_total: int


class CacheGroup(Schema):
    """What one tenant or namespace holds on one node, over all tiers."""

    kind: Literal["tenant", "namespace"]
    name: str
    used_blocks: int
    used_bytes: int
    quota_bytes: int | None = None


class CacheNode(Schema):
    """One node's pool. Unknown is null."""

    node: str
    state: NodeState
    capacity_blocks: int | None = None
    used_blocks: int | None = None
    pinned_blocks: int | None = None
    block_bytes: int | None = None
    hit_tokens_total: int | None = None
    prompt_tokens_total: int | None = None
    evicted_blocks_total: int | None = None
    policy: str | None = None
    tiers: list[CacheTier] = []
    groups: list[CacheGroup] = []


class CacheNamespace(Schema):
    """A namespace that some node knows, and who serves it now."""

    namespace: str
    model: str
    weights_version: str
    kv_dtype: str
    block_tokens: int
    block_bytes: int
    nodes: list[str]
    workers: list[str]  # none: nobody can use these blocks now
    used_blocks: int | None = None


class CacheStat(Schema):
    """GET /api/v1/cache: from the nodes' last heartbeats, without asking them."""

    nodes: list[CacheNode]
    namespaces: list[CacheNamespace]


class CacheJob(Schema):
    """202: the job that does it."""

    job: Job


def _need(body: Schema, fields: tuple[str, ...]) -> None:
    if all(getattr(body, name) is None for name in fields):
        expected = f"at least one of {', '.join(fields)}"
        raise PydanticCustomError("nothing_selected", "Nothing is selected", {"expected": expected})
