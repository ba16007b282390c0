"""Workers: the engine processes. (The folder is `fleet` so that no one confuses it with the
top-level package `workers`.)"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from controlplane.schema_base import Id, ModelId, Page, Reason, Schema, Url

WorkerRole = Literal["prefill", "decode", "both"]
WorkerState = Literal[
    "requested", "launching", "loading", "ready", "draining", "stopped", "failed", "lost"
]


class Worker(Schema):
    """One engine process. It follows its node: a lost node's workers are lost."""

    id: str
    node_id: str
    role: WorkerRole
    model: str
    url: str
    state: WorkerState
    engine: Literal["vllm", "emulated"] = "vllm"
    pid: int | None = None
    restarts: int = 0
    started_at: datetime | None = None
    last_error: str = ""
    log_file: str = ""
    namespace: str | None = None  # hex digest
    block_tokens: int | None = None
    rss_bytes: int | None = None
    running: int | None = None  # requests in flight, as the gateways see them
    waiting: int | None = None
    max_concurrent_requests: int = 16
    age_seconds: float = 0.0


class WorkerAction(Schema):
    """Body of POST /api/v1/workers/{id}/actions."""

    action: Literal["restart", "drain", "resume"]
    reason: Reason = ""


class WorkerRegistration(Schema):
    """Body of POST /api/v1/workers: an engine that Perilune did not start (tests: emulated)."""

    id: Id
    role: WorkerRole
    model: ModelId
    url: Url
    engine: Literal["vllm", "emulated"] = "vllm"
    node_id: Id = "external"
    max_concurrent_requests: Annotated[int, Field(ge=1, le=4096)] = 16


class WorkerList(Page):
    """GET /api/v1/workers, by id."""

    items: list[Worker]


class WorkerActionReply(Schema):
    """The worker as the view shows it now; `command_id` is null where no process must act."""

    worker: Worker
    command_id: str | None = None
