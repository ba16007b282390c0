"""Addresses of the pages. `mount` is the entry point that the control plane calls at its start."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from console.web.pages import (
    audit,
    cache,
    cluster,
    doctor,
    jobs,
    policies,
    pool,
    requests,
    transfers,
)
from console.web.website import Website

FigureView = Literal["hit-rate", "evictions"]
PoolView = Literal["tiers", "tenants", "what-if", "pins"]
ActKind = Literal[
    "pin", "unpin", "prefetch", "purge", "cancel", "undo", "doctor", "cancel_request"
]  # fmt: skip
FigureName = Literal["hit-rate", "evictions", "transfers", "node-transfers"]


class Settings(Protocol):
    """What the pages need to know of the control plane's settings."""

    cluster: str


def mount(app: FastAPI, settings: Settings) -> None:
    """Add the pages to `app`. They read its REST; they write nothing by themselves."""
    site = Website(app, settings.cluster)
    router = APIRouter(include_in_schema=False)
    _add_pages(router, site)
    _add_lists(router, site)
    _add_parts(router, site)
    _add_objects(router, site)
    app.include_router(router)


def _add_pages(router: APIRouter, site: Website) -> None:
    @router.get("/")
    async def overview(request: Request) -> Response:
        return await site.page(request, cluster.overview_page)

    @router.get("/topology")
    async def topology(request: Request) -> Response:
        return await site.page(request, cluster.topology_page)

    @router.get("/cache")
    async def cache_default(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"/cache/hit-rate{query}")

    @router.get("/cache/{view}")
    async def cache_view(request: Request, view: FigureView | PoolView) -> Response:
        if view in get_args(FigureView):
            return await site.page(request, lambda context: cache.cache_page(context, view))
        return await site.page(request, lambda context: pool.pool_page(context, view))

    @router.get("/transfers")
    async def transfer_matrix(request: Request) -> Response:
        return await site.page(request, transfers.transfers_page)

    @router.get("/requests")
    async def request_list(request: Request) -> Response:
        return await site.page(request, requests.requests_page)

    @router.get("/in-flight")
    async def in_flight(request: Request) -> Response:
        return await site.page(request, requests.in_flight_page)

    @router.get("/rejections")
    async def rejections(request: Request) -> Response:
        return await site.page(request, requests.rejections_page)


def _add_lists(router: APIRouter, site: Website) -> None:
    @router.get("/policies")
    async def policy_list(request: Request) -> Response:
        return await site.page(request, policies.policies_page)

    @router.get("/jobs")
    async def job_list(request: Request) -> Response:
        return await site.page(request, jobs.jobs_page)

    @router.get("/doctor")
    async def last_run(request: Request) -> Response:
        return await site.page(request, doctor.doctor_page)

    @router.get("/audit")
    async def audit_trail(request: Request) -> Response:
        return await site.page(request, audit.audit_page)


def _add_objects(router: APIRouter, site: Website) -> None:
    @router.get("/nodes/{node_id}")
    async def node(request: Request, node_id: str) -> Response:
        return await site.page(request, lambda context: cluster.node_page(context, node_id))

    @router.get("/workers/{worker_id}")
    async def worker(request: Request, worker_id: str) -> Response:
        return await site.page(request, lambda context: cluster.worker_page(context, worker_id))

    @router.get("/transfers/{source}/{destination}")
    async def pair(request: Request, source: str, destination: str) -> Response:
        return await site.page(
            request, lambda context: transfers.pair_page(context, source, destination)
        )

    @router.get("/requests/{request_id}")
    async def one_request(request: Request, request_id: str) -> Response:
        return await site.page(request, lambda context: requests.request_page(context, request_id))

    @router.get("/jobs/{job_id}")
    async def job(request: Request, job_id: str) -> Response:
        return await site.page(request, lambda context: jobs.job_page(context, job_id))

    @router.get("/policies/{kind}/{scope:path}")
    async def policy(request: Request, kind: str, scope: str) -> Response:
        return await site.page(request, lambda context: policies.policy_page(context, kind, scope))


def _add_parts(router: APIRouter, site: Website) -> None:
    @router.get("/policies/{kind}/{scope:path}/check")
    async def check(request: Request, kind: str, scope: str) -> Response:
        return await site.check(request, kind, scope)

    @router.get("/acts/{kind}")
    async def act(request: Request, kind: ActKind) -> Response:
        return await site.act(request, kind)

    @router.get("/figures/what-if")
    async def what_if(request: Request) -> Response:
        return await site.curve(request)

    @router.get("/figures/{name}")
    async def figure(request: Request, name: FigureName) -> Response:
        return await site.figure(request, name)

    @router.get("/static/{digest}/{name}")
    async def static(request: Request, digest: str, name: str) -> Response:
        return await site.static(request, digest, name)
