"""REST calls of cache operations and jobs as values, for the clients' `send`."""

from __future__ import annotations

from controlplane.cache.schemas import (
    CacheChainList,
    CacheJob,
    CachePinList,
    CacheReplicate,
    CacheStat,
    Selected,
)
from controlplane.calls import API, Call
from controlplane.jobs.schemas import Job, JobKind, JobList, JobUndoRequest


def _given(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


def stat() -> Call[CacheStat]:
    return Call("GET", f"{API}/cache", CacheStat)


def chains(
    *,
    node: str | None = None,
    namespace: str | None = None,
    tenant: str | None = None,
    key: str | None = None,
    order: str = "newest",
    limit: int = 100,
    cursor: str | None = None,
) -> Call[CacheChainList]:
    params = _given(
        node=node,
        namespace=namespace,
        tenant=tenant,
        key=key,
        order=order,
        limit=limit,
        cursor=cursor,
    )
    return Call("GET", f"{API}/cache/chains", CacheChainList, params, timeout_seconds=30)


def pins(
    *,
    node: str | None = None,
    namespace: str | None = None,
    tenant: str | None = None,
    key: str | None = None,
) -> Call[CachePinList]:
    params = _given(node=node, namespace=namespace, tenant=tenant, key=key)
    return Call("GET", f"{API}/cache/pins", CachePinList, params, timeout_seconds=30)


def operate(kind: JobKind, body: Selected | CacheReplicate) -> Call[CacheJob]:
    """POST /api/v1/cache/{kind}: `body` is that kind's."""
    return Call("POST", f"{API}/cache/{kind}", CacheJob, body=body, timeout_seconds=30)


def jobs(
    *,
    state: str | None = None,
    kind: str | None = None,
    limit: int = 100,
    cursor: str | None = None,
) -> Call[JobList]:
    params = _given(state=state, kind=kind, limit=limit, cursor=cursor)
    return Call("GET", f"{API}/jobs", JobList, params)


def job(job_id: int) -> Call[Job]:
    return Call("GET", f"{API}/jobs/{job_id}", Job)


def cancel_job(job_id: int, reason: str = "") -> Call[Job]:
    return Call("DELETE", f"{API}/jobs/{job_id}", Job, _given(reason=reason))


def undo_job(job_id: int, reason: str = "") -> Call[Job]:
    return Call("POST", f"{API}/jobs/{job_id}/undo", Job, body=JobUndoRequest(reason=reason))
