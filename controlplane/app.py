"""The web application: every noun's endpoints under /api/v1, /health, /metrics, and the pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from controlplane import problems
from controlplane.audit.endpoints import router as audit
from controlplane.cache.endpoints import router as cache
from controlplane.calls import API
from controlplane.clock import Clock
from controlplane.db.migrate import migrate
from controlplane.decisions.endpoints import router as decisions
from controlplane.deps import PlaneDep, known_parameters_only
from controlplane.doctor.endpoints import router as doctor
from controlplane.edge import Edge
from controlplane.errors import PROBLEM_TYPE
from controlplane.events.endpoints import router as events
from controlplane.fleet.endpoints import router as fleet
from controlplane.gateways.endpoints import router as gateways
from controlplane.index_audit.endpoints import router as index_audit
from controlplane.jobs.endpoints import router as jobs
from controlplane.ledger.endpoints import router as ledger
from controlplane.loops.runner import Loops
from controlplane.metrics.exporter import CONTENT_TYPE, Exporter
from controlplane.models.endpoints import router as models
from controlplane.nodes.endpoints import router as nodes
from controlplane.pages import mount_pages
from controlplane.plane import Plane
from controlplane.policies.endpoints import router as policies
from controlplane.schema_base import Problem
from controlplane.settings import Settings
from controlplane.stats.endpoints import router as stats
from controlplane.tokens.endpoints import router as tokens
from controlplane.transfers.endpoints import router as transfers

PROBLEM_RESPONSES: dict[int | str, dict[str, object]] = {
    "4XX": {
        "description": "problem+json: what is wrong with which field and value, and the way out",
        "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    },
    "503": {
        "description": "problem+json: the database does not answer; nothing was changed",
        "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    },
}
root = APIRouter()


def create_app(settings: Settings, clock: Clock | None = None) -> FastAPI:
    """The application. Its lifespan migrates the database, reads it, and runs the loops."""
    plane = Plane(settings, clock)
    app = FastAPI(title="Perilune control plane", version="1", docs_url=None, redoc_url=None)
    app.router.lifespan_context = _lifespan
    app.state.plane = plane
    app.state.public_paths = set[str]()
    for router in (
        nodes, fleet, models, policies, decisions, gateways, stats, audit, tokens, events, cache, jobs,
        index_audit, doctor, transfers, ledger,
    ):  # fmt: skip
        app.include_router(
            router,
            prefix=API,
            dependencies=[Depends(known_parameters_only)],
            responses=PROBLEM_RESPONSES,
        )
    app.include_router(root)
    problems.install(app)
    if settings.load_pages:
        mount_pages(app, settings)
    app.add_middleware(
        Edge, settings=settings, counts=plane.counts, open_paths=app.state.public_paths
    )
    _describe_problems(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    plane: Plane = app.state.plane
    await asyncio.to_thread(migrate, plane.settings.database_url)
    try:
        await plane.load()
        async with Loops(plane) as loops:
            app.state.exporter = Exporter(plane, loops)
            yield
            plane.close_streams()
    finally:
        await plane.close()


@root.get("/health", tags=["health"])
async def health(plane: PlaneDep) -> dict[str, object]:
    """Alive; answers without the database and without the token."""
    return {
        "status": "ok",
        "cluster": plane.settings.cluster,
        "boot_id": plane.bus.boot_id,
        "uptime_seconds": round(plane.clock.monotonic() - plane.started_at, 3),
    }


@root.get("/metrics", tags=["health"], response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus text; docs/metrics.md defines every series."""
    exporter: Exporter = request.app.state.exporter
    return Response(exporter.text(), media_type=CONTENT_TYPE)


def _describe_problems(app: FastAPI) -> None:
    """Put `Problem` into the OpenAPI document; FastAPI's own 422 is not what we answer."""

    def openapi() -> dict[str, object]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            components["Problem"] = Problem.model_json_schema()
            for methods in schema["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
            components.pop("HTTPValidationError", None)
            components.pop("ValidationError", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
