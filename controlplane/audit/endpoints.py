"""GET /api/v1/audit."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from controlplane.audit import repository
from controlplane.audit.schemas import AuditList
from controlplane.audit.service import to_schema
from controlplane.deps import PlaneDep

router = APIRouter(tags=["audit"])
MAX_ID = 2**53


@router.get("/audit")
async def list_audit(
    plane: PlaneDep,
    actor: Annotated[str | None, Query(max_length=64)] = None,
    verb: Annotated[str | None, Query(max_length=64)] = None,
    target: Annotated[str | None, Query(max_length=300)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
) -> AuditList:
    """Newest first; the cursor is the id of the last row read."""
    async with plane.db.read() as session:
        records = await repository.newest(
            session, limit=limit + 1, before_id=cursor, actor=actor, verb=verb, target=target
        )
    items = [to_schema(record) for record in records[:limit]]
    more = len(records) > limit
    return AuditList(items=items, next_cursor=str(items[-1].id) if more else None)
