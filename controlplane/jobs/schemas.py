"""Jobs: an operator's actions that take longer than a request."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from controlplane.schema_base import Page, Reason, Schema

JobKind = Literal["pin", "unpin", "purge", "prefetch", "replicate"]
JobState = Literal["queued", "running", "done", "failed", "cancelled"]
LIVE_STATES: tuple[JobState, ...] = ("queued", "running")


class JobProgress(Schema):
    """`total` is null while it is not known; a walk over a changing pool may end beside it."""

    done: Annotated[int, Field(ge=0)] = 0
    total: int | None = None
    unit: str = "blocks"
    note: str = ""  # where it is now, e.g. "node n1"


class JobUndo(Schema):
    """Whether POST /api/v1/jobs/{id}/undo works; `how` says what it would do, or why it cannot."""

    possible: bool = False
    how: str = ""
    job_id: int | None = None  # the job that took it back


class Job(Schema):
    """One action. `result` has figures by node; `error` names what is wrong and the way out."""

    id: int
    kind: JobKind
    target: str
    spec: dict[str, object]
    state: JobState
    progress: JobProgress = JobProgress()
    attempts: int = 0  # more than one: it went on after a restart of the control plane
    automatic: bool = False  # begun by the control plane itself
    cancelling: bool = False
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    author: str
    reason: str = ""
    error: str = ""
    result: dict[str, object] = {}
    undo: JobUndo = JobUndo()


class JobList(Page):
    """GET /api/v1/jobs, newest first."""

    items: list[Job]


class JobUndoRequest(Schema):
    """Body of POST /api/v1/jobs/{id}/undo."""

    reason: Reason = ""
