"""REST of policies. A PUT answers once every live gateway acts on it, or after a second."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Response

from controlplane.deps import Actor, OperatorDep, PlaneDep
from controlplane.plane import Plane
from controlplane.policies import repository
from controlplane.policies.schemas import (
    SCOPE_PATTERN,
    SLO_SCOPE_PATTERN,
    PolicyKind,
    PolicyList,
    PolicyPut,
    PolicyPutReply,
    PolicyRevert,
    PolicyRevision,
)
from controlplane.policies.service import Change, to_schema

router = APIRouter(tags=["policies"])
Scope = Annotated[str, Path(pattern=rf"{SCOPE_PATTERN}|{SLO_SCOPE_PATTERN}")]
IfMatch = Annotated[str | None, Header(max_length=64)]
MAX_REVISION = 2**31 - 1
Revision = Annotated[int, Path(ge=1, le=MAX_REVISION)]


@router.get("/policies")
async def list_policies(plane: PlaneDep) -> PolicyList:
    """The active ones."""
    return PolicyList(items=plane.policies.list())


@router.get("/policies/{kind}/{scope:path}/revisions/{revision}")
async def get_revision(
    plane: PlaneDep, kind: PolicyKind, scope: Scope, revision: Revision
) -> PolicyRevision:
    async with plane.db.read() as session:
        return await plane.policies.revision(session, kind, scope, revision)


@router.get("/policies/{kind}/{scope:path}/revisions")
async def list_revisions(
    plane: PlaneDep,
    kind: PolicyKind,
    scope: Scope,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[int | None, Query(ge=1, le=MAX_REVISION)] = None,
) -> PolicyList:
    """Newest first; the cursor is the last revision read."""
    active = plane.policies.find(kind, scope).revision
    async with plane.db.read() as session:
        rows = await repository.revisions(session, kind, scope, limit + 1, cursor)
    items = [to_schema(row, active=row.revision == active) for row in rows[:limit]]
    more = len(rows) > limit
    return PolicyList(items=items, next_cursor=str(items[-1].revision) if more else None)


# After those with more behind the scope, which may have slashes.
@router.get("/policies/{kind}/{scope:path}")
async def get_policy(
    plane: PlaneDep, kind: PolicyKind, scope: Scope, response: Response
) -> PolicyRevision:
    """The active revision; its ETag goes into If-Match of a change."""
    policy = plane.policies.find(kind, scope)
    response.headers["ETag"] = f'"{policy.revision}"'
    return policy


@router.put("/policies/{kind}/{scope:path}")
async def put_policy(
    plane: PlaneDep,
    operator: OperatorDep,
    kind: PolicyKind,
    scope: Scope,
    body: PolicyPut,
    response: Response,
    if_match: IfMatch = None,
) -> PolicyPutReply:
    """A new revision, active at once. An existing policy needs If-Match (428, 412)."""
    change = Change(kind, scope, body.spec, operator.name, body.reason, if_match)
    return await _apply(plane, operator, change, "policy.put", response)


@router.post("/policies/{kind}/{scope:path}/revert")
async def revert_policy(
    plane: PlaneDep,
    operator: OperatorDep,
    kind: PolicyKind,
    scope: Scope,
    body: PolicyRevert,
    response: Response,
    if_match: IfMatch = None,
) -> PolicyPutReply:
    """A new revision with the spec of an old one. If-Match is optional here."""
    async with plane.db.read() as session:
        old = await plane.policies.revision(session, kind, scope, body.revision)
    reason = body.reason or f"back to revision {body.revision}"
    change = Change(kind, scope, old.spec, operator.name, reason, if_match or "*")
    return await _apply(plane, operator, change, "policy.revert", response)


async def _apply(
    plane: Plane, operator: Actor, change: Change, verb: str, response: Response
) -> PolicyPutReply:
    async with plane.db.write() as tx:
        before, after = await plane.policies.put(tx, change)
        await plane.audit.record(
            tx,
            actor=operator.name,
            request_id=operator.request_id,
            verb=verb,
            target=f"{change.kind}/{change.scope}",
            before={"revision": before.revision, **before.spec} if before else None,
            after={"revision": after.revision, **after.spec},
            reason=change.reason,
        )
        tx.after_commit(plane.view.bump)
        tx.after_commit(lambda: plane.bus.publish("policy", after))
    acknowledged, pending = await plane.view.acknowledged_by(plane.gateways.live_ids())
    response.headers["ETag"] = f'"{after.revision}"'
    return PolicyPutReply(
        active=after, acknowledged_gateways=acknowledged, pending_gateways=pending
    )
