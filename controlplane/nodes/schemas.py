"""Nodes: a machine with one agent and its KV pool."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from controlplane.schema_base import MAX_INTEGER, Page, Schema

NodeState = Literal["ready", "not_ready", "stale", "lost"]
"""ready: heartbeat younger than 3 s; stale: younger than 10 s; lost: older. not_ready: it is heard,
and has no way to move blocks that it was told to have; its own workers serve on."""


class Node(Schema):
    """One row a node, whatever its incarnations; `restarts` counts them."""

    id: str
    state: NodeState
    incarnation: int
    restarts: int = 0
    joined_at: datetime
    last_heartbeat_at: datetime
    heartbeat_age_seconds: float
    not_ready: str = ""  # why, and what to do
    transfer_problem: str = ""  # a transport that is wanted and not had, while others do
    events_endpoint: str = ""  # unix:/path or tcp:host:port of the agent
    index_epoch: int = 0  # gateways read the node's blocks anew when it grows
    block_tokens: int | None = None
    namespaces: list[str] = []  # hex digests
    slab_bytes: int | None = None
    used_blocks: int | None = None  # unknown is null, not 0
    capacity_blocks: int | None = None
    pinned_blocks: int | None = None
    block_bytes: int | None = None
    rss_bytes: int | None = None
    write_queue_blocks: int | None = None
    write_queue_bound: int | None = None


class Heartbeat(Schema):
    """Body of POST /api/v1/nodes/{id}/heartbeat, sent each second by the agent.

    `pool_stats` is the agent's `PoolStats` message as JSON (bytes as hex); `leg_reports` are the
    new `LegReport`s since the last acknowledged heartbeat, bounded.
    """

    incarnation: Annotated[int, Field(ge=0, le=MAX_INTEGER)]
    events_endpoint: Annotated[str, Field(max_length=2000)] = ""
    pool_stats: dict[str, object] | None = None
    leg_reports: list[dict[str, object]] = Field(default=[], max_length=2000)
    acknowledged_commands: list[str] = Field(default=[], max_length=100)


class HeartbeatReply(Schema):
    """What the control plane wants done on the node."""

    commands: list[dict[str, str]] = []  # WorkerCommand as JSON
    cache_policy_revision: int = 0
    cache_policy: dict[str, object] = {}
    transfer_policy_revision: int = 0
    transfer_policy: dict[str, object] = {}


class NodeList(Page):
    """GET /api/v1/nodes, by id."""

    items: list[Node]
