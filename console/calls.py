"""REST calls of the cache and jobs screens, as values; both clients send them."""

from __future__ import annotations

from urllib.parse import quote

from console.viewmodel.acts import Act
from controlplane.cache.schemas import CacheJob, CachePinList
from controlplane.calls import API, Call
from controlplane.jobs.schemas import Job, JobList, JobUndoRequest
from controlplane.nodes.calls import pool_report
from controlplane.nodes.pool_schemas import PoolReport

PINS_TIMEOUT_SECONDS = 10.0


def pool(window: float = 900) -> Call[PoolReport]:
    """Tiers, groups, health of eviction, what-if."""
    return pool_report(window)


def pins() -> Call[CachePinList]:
    """Operators' pins; the nodes are asked, within their own bounds."""
    path = f"{API}/cache/pins"
    return Call("GET", path, CachePinList, timeout_seconds=PINS_TIMEOUT_SECONDS)


def jobs(limit: int = 100) -> Call[JobList]:
    """Newest first."""
    return Call("GET", f"{API}/jobs", JobList, {"limit": str(limit)})


def job(job_id: str) -> Call[Job]:
    """One job, however old."""
    return Call("GET", f"{API}/jobs/{quote(job_id, safe='')}", Job)


def cache_act(act: Act) -> Call[CacheJob]:
    """Pin, unpin, purge, prefetch: each is a job."""
    return Call("POST", f"{API}/cache/{act.kind}", CacheJob, body=act.body)


def job_act(act: Act, reason: str) -> Call[Job]:
    """Cancel a job, or take it back."""
    path = f"{API}/jobs/{act.job_id}"
    if act.kind == "cancel":
        return Call("DELETE", path, Job, {"reason": reason} if reason else {})
    return Call("POST", f"{path}/undo", Job, body=JobUndoRequest(reason=reason))
