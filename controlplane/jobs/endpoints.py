"""REST of jobs: see them, cancel them, take them back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from controlplane.deps import OperatorDep, PlaneDep
from controlplane.errors import ConflictError
from controlplane.jobs import repository
from controlplane.jobs.schemas import (
    LIVE_STATES,
    Job,
    JobKind,
    JobList,
    JobState,
    JobUndoRequest,
)
from controlplane.jobs.service import NewJob

router = APIRouter(tags=["jobs"])
MAX_ID = 2**31 - 1
JobId = Annotated[int, Path(ge=1, le=MAX_ID)]


@router.get("/jobs")
async def list_jobs(
    plane: PlaneDep,
    state: Annotated[JobState | None, Query()] = None,
    kind: Annotated[JobKind | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
) -> JobList:
    """Newest first; the cursor is the id of the last job read."""
    async with plane.db.read() as session:
        items = await plane.jobs.newest(
            session, limit=limit + 1, before_id=cursor, state=state, kind=kind
        )
    more = len(items) > limit
    shown = items[:limit]
    return JobList(items=shown, next_cursor=str(shown[-1].id) if more else None)


@router.get("/jobs/{job_id}")
async def get_job(plane: PlaneDep, job_id: JobId) -> Job:
    async with plane.db.read() as session:
        return await plane.jobs.find(session, job_id)


@router.delete("/jobs/{job_id}", status_code=202)
async def cancel_job(
    plane: PlaneDep,
    operator: OperatorDep,
    job_id: JobId,
    reason: Annotated[str, Query(max_length=500)] = "",
) -> Job:
    """End a job that waits, or have a running one stop; what it has done stays done. One that has
    ended answers 409."""
    async with plane.db.write() as tx:
        return await plane.jobs.cancel(
            tx, job_id, actor=operator.name, request_id=operator.request_id, reason=reason
        )


@router.post("/jobs/{job_id}/undo", status_code=202)
async def undo_job(
    plane: PlaneDep, operator: OperatorDep, job_id: JobId, body: JobUndoRequest
) -> Job:
    """Take a job back with another one, where that can be done; else 409 says why not."""
    async with plane.db.write() as tx:
        job = await plane.jobs.find(tx.session, job_id)
        if job.state in LIVE_STATES or not job.undo.possible:
            why = job.undo.how or "Nothing of it is left to take back."
            live = job.state in LIVE_STATES
            raise ConflictError(
                f"Job {job_id} is {job.state} and cannot be taken back now."
                if live
                else f"Job {job_id} cannot be taken back: {why}",
                field="job_id",
                value=job_id,
                way_out="Cancel it." if live else None,
            )
        row = await repository.get(tx.session, job_id)
        assert row is not None
        new = NewJob(
            kind=row.undo["kind"],  # type: ignore[arg-type]  # written by our own operations
            target=job.target,
            spec=row.undo["spec"],  # type: ignore[arg-type]
            author=operator.name,
            reason=body.reason or f"takes back job {job_id}",
            request_id=operator.request_id,
            undoes=job_id,
        )
        return await plane.jobs.create(tx, new)
