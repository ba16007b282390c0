"""The event stream: GET /api/v1/events (SSE), resumable with Last-Event-ID."""

from typing import Literal

from controlplane.schema_base import Schema

EventType = Literal[
    "reset", "tick", "node", "node_removed", "worker", "gateway", "policy", "decision", "audit",
    "job",
]  # fmt: skip


class Event(Schema):
    """One SSE event: `id:` is `<boot>-<n>`, `event:` the type, `data:` this object's `data`.

    - reset: {} the ring no longer holds what was asked for: read everything again
    - tick: each second, {"at": s, "overview": Overview, "points": {"<source>": {"<metric>": v}}}
    - node, worker, gateway, policy, decision, audit, job: the whole row, as REST gives it (a running
      job's progress at most four times a second, not kept for those who resume)
    - node_removed: {"id": ...}
    """

    id: str
    type: EventType
    data: dict[str, object]
