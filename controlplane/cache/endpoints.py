"""REST of cache operations. What changes something is a job: 202 and its id."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from controlplane.cache import reading
from controlplane.cache.agents import NodeError, open_agent, targets
from controlplane.cache.names import target_name
from controlplane.cache.purges import NOT_UNDOABLE
from controlplane.cache.schemas import (
    CacheChainList,
    CacheJob,
    CachePin,
    CachePinList,
    CachePrefetch,
    CachePurge,
    CacheReplicate,
    CacheStat,
    CacheUnpin,
)
from controlplane.cache.selection import selection_of, spec_of, whole_namespace
from controlplane.cache.stat import cache_stat
from controlplane.deps import Actor, OperatorDep, PlaneDep
from controlplane.errors import InvalidError
from controlplane.jobs.schemas import JobKind
from controlplane.jobs.service import NewJob
from controlplane.plane import Plane
from controlplane.schema_base import MAX_INTEGER
from workers.core.cache_messages import ChainPage, ListChains, Selection

router = APIRouter(tags=["cache"], prefix="/cache")
NodeQuery = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")]
NamespaceQuery = Annotated[str | None, Query(pattern=r"^[0-9a-f]{8,64}$")]
TenantQuery = Annotated[str | None, Query(max_length=512)]
KeyQuery = Annotated[str | None, Query(pattern=r"^[0-9a-f]{32}$")]


@router.get("")
async def stat(plane: PlaneDep) -> CacheStat:
    """Every node's pool and every namespace, as the last heartbeats said."""
    stats_of = {node.id: node.stats for node in plane.nodes.live()}
    return cache_stat((node, stats_of.get(node.id)) for node in plane.nodes.list())


@router.get("/chains")
async def chains(
    plane: PlaneDep,
    node: NodeQuery = None,
    namespace: NamespaceQuery = None,
    tenant: TenantQuery = None,
    key: KeyQuery = None,
    order: Literal["newest", "hits"] = "newest",
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[str | None, Query(max_length=160)] = None,
) -> CacheChainList:
    """Chains, node after node, the newest stored first; or those with most hits, without paging.
    `key`: the chains through this block. The nodes are asked now, within a few seconds."""
    selection = _selection(plane, namespace, tenant, key)
    where = targets(plane.nodes, node)
    if order == "hits":
        return await reading.hottest(plane.nodes, where, selection, limit)
    return await reading.Walk(plane.nodes, selection, limit).page(where, _position(cursor))


@router.get("/pins")
async def pins(
    plane: PlaneDep,
    node: NodeQuery = None,
    namespace: NamespaceQuery = None,
    tenant: TenantQuery = None,
    key: KeyQuery = None,
) -> CachePinList:
    """Operators' pins that hold a block of the selection; the nodes are asked now."""
    selection = _selection(plane, namespace, tenant, key)
    return await reading.pins(plane.nodes, plane.clock, targets(plane.nodes, node), selection)


@router.post("/pin", status_code=202)
async def pin(plane: PlaneDep, operator: OperatorDep, body: CachePin) -> CacheJob:
    """Keep from eviction, on all nodes asked for or on none. Undone by unpin."""
    spec = spec_of(plane.nodes, body)
    spec["name"] = body.name or f"pin-{secrets.token_hex(3)}"
    seconds = spec.pop("for_seconds", None)
    if body.for_seconds is not None and seconds is not None:
        until = plane.clock.now() + timedelta(seconds=body.for_seconds)
        spec["expires_at"] = until.isoformat()
    return await _queue(plane, operator, "pin", spec, body.reason)


@router.post("/unpin", status_code=202)
async def unpin(plane: PlaneDep, operator: OperatorDep, body: CacheUnpin) -> CacheJob:
    """End pins. Undone by pinning again what is still there."""
    spec = spec_of(plane.nodes, body)
    return await _queue(plane, operator, "unpin", spec, body.reason)


@router.post("/purge", status_code=202)
async def purge(plane: PlaneDep, operator: OperatorDep, body: CachePurge) -> CacheJob:
    """Withdraw blocks from the index. Running requests keep what they read until they let go."""
    spec = spec_of(plane.nodes, body)
    await _check_confirmed(plane, spec, body)
    return await _queue(plane, operator, "purge", spec, body.reason)


@router.post("/prefetch", status_code=202)
async def prefetch(plane: PlaneDep, operator: OperatorDep, body: CachePrefetch) -> CacheJob:
    """From SSD into memory."""
    return await _queue(plane, operator, "prefetch", spec_of(plane.nodes, body), body.reason)


@router.post("/replicate", status_code=202)
async def replicate(plane: PlaneDep, operator: OperatorDep, body: CacheReplicate) -> CacheJob:
    """Copy from one node to another, verified at both ends."""
    return await _queue(plane, operator, "replicate", spec_of(plane.nodes, body), body.reason)


async def _queue(
    plane: Plane, operator: Actor, kind: JobKind, spec: dict[str, Any], reason: str
) -> CacheJob:
    new = NewJob(
        kind=kind,
        target=target_name(spec) or str(spec.get("name", "")),
        spec=spec,
        author=operator.name,
        reason=reason,
        request_id=operator.request_id,
    )
    async with plane.db.write() as tx:
        return CacheJob(job=await plane.jobs.create(tx, new))


def _selection(
    plane: Plane, namespace: str | None, tenant: str | None, key: str | None
) -> Selection:
    whole = None if namespace is None else whole_namespace(plane.nodes, namespace)
    return selection_of({"namespace": whole, "tenant": tenant, "key": key})


def _position(cursor: str | None) -> tuple[str, int] | None:
    if cursor is None:
        return None
    node, _, position = cursor.rpartition(":")
    if not node or not position.isdecimal() or int(position) > MAX_INTEGER:
        raise InvalidError(
            "cursor: not one of this list.",
            field="cursor",
            value=cursor,
            way_out="Pass next_cursor of the page before.",
        )
    return node, int(position)


async def _check_confirmed(plane: Plane, spec: dict[str, Any], body: CachePurge) -> None:
    name, confirm = target_name(spec), body.confirm
    if confirm and confirm in (name, target_name(body.model_dump())):  # digits as they came
        return
    if not confirm and await _is_one_chain(plane, spec):
        return
    given = f"confirm = {confirm!r}" if confirm else "confirm is missing"
    raise InvalidError(
        f"{given}: this purges more than one chain. {NOT_UNDOABLE}",
        field="confirm",
        value=confirm,
        way_out=f"Repeat the target's name to agree: {name}",
    )


async def _is_one_chain(plane: Plane, spec: dict[str, Any]) -> bool:
    """At most one chain on each node goes. A node that does not answer may have more."""
    if "key" not in spec:
        return False
    selection = selection_of(spec)
    try:
        for target in targets(plane.nodes, spec.get("node")):
            async with open_agent(target) as agent:
                page = await agent.call(ListChains(selection, 0, 2), ChainPage)
            if len(page.chains) > 1 or page.cursor is not None:
                return False
    except NodeError:
        return False
    return True
