"""The control plane's routes of the pool and of jobs, answered from recorded objects."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from controlplane.cache.schemas import CachePinList
from controlplane.jobs.schemas import JobList
from controlplane.nodes.pool_schemas import PoolReport
from controlplane.schema_base import Problem, Schema


def _reply(body: Schema) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def add_pool(app: FastAPI, recorded: Any) -> None:
    """`recorded` has `pool`, `pins`, `unreachable` and `jobs`."""

    @app.get("/api/v1/cache/pool")
    async def pool() -> Response:
        return _reply(recorded.pool or PoolReport(at=recorded.at, window_seconds=900, nodes=[]))

    @app.get("/api/v1/cache/pins")
    async def pins() -> Response:
        return _reply(CachePinList(items=recorded.pins, unreachable=recorded.unreachable))

    @app.get("/api/v1/jobs")
    async def jobs() -> Response:
        return _reply(JobList(items=recorded.jobs))

    @app.get("/api/v1/jobs/{job_id}")
    async def one(job_id: int) -> Response:
        found = [job for job in recorded.jobs if job.id == job_id]
        if found:
            return _reply(found[0])
        problem = Problem(title="No such job", status=404, detail=f"No job {job_id}.")
        return JSONResponse(problem.model_dump(), 404, media_type="application/problem+json")
