"""Workers: the engine processes. (The folder is `fleet` so that no one confuses it with the
top-level package `workers`.)"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from controlplane.core.handshake import HandshakeName
from controlplane.core.health import DataPathState
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
    handshake: HandshakeName = "perilune"
    bootstrap: str = ""  # of a mooncake producer: http://host:port
    engine_id: str = ""
    data_path: DataPathState | None = None  # the worst that a gateway's legs have met
    data_path_note: str = ""  # like "probe ok, requests failing: answered 502: ..."
    age_seconds: float = 0.0


class WorkerAction(Schema):
    """Body of POST /api/v1/workers/{id}/actions."""

    action: Literal["restart", "drain", "resume"]
    reason: Reason = ""


class WorkerRegistration(Schema):
    """Body of POST /api/v1/workers: an engine that Perilune did not start (tests: emulated).

    `handshake`: the KV connector that it runs; `perilune` wants an agent of ours on `node_id`.
    `bootstrap`: of a mooncake producer; its engine id is read from there unless `engine_id` is given.
    """

    id: Id
    role: WorkerRole
    model: ModelId
    url: Url
    engine: Literal["vllm", "emulated"] = "vllm"
    node_id: Id = "external"
    max_concurrent_requests: Annotated[int, Field(ge=1, le=4096)] = 16
    handshake: HandshakeName = "perilune"
    bootstrap: Url | Literal[""] = ""
    engine_id: Annotated[str, Field(pattern=r"^[!-~]{0,256}$")] = ""

    @model_validator(mode="after")
    def _has_a_bootstrap(self) -> "WorkerRegistration":
        produces = self.handshake == "mooncake" and self.role != "decode"
        if produces and not self.bootstrap:
            raise PydanticCustomError(
                "bootstrap_missing",
                "bootstrap is missing: decode workers ask it how to reach this producer",
                {"way_out": "Give the producer's bootstrap address, like http://10.0.0.1:8998."},
            )
        if not produces and (self.bootstrap or self.engine_id):
            raise PydanticCustomError(
                "bootstrap_not_used",
                "bootstrap and engine_id are for prefill workers of the handshake mooncake",
                {"way_out": "Leave bootstrap and engine_id out."},
            )
        return self


class WorkerList(Page):
    """GET /api/v1/workers, by id."""

    items: list[Worker]


class WorkerActionReply(Schema):
    """The worker as the view shows it now; `command_id` is null where no process must act."""

    worker: Worker
    command_id: str | None = None
