"""REST of decision records."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query

from controlplane.decisions.repository import Filters
from controlplane.decisions.schemas import Decision, DecisionList, RequestStatus
from controlplane.decisions.service import check_time
from controlplane.deps import PlaneDep
from controlplane.prompts import service as prompts
from controlplane.prompts.schemas import Prompt

router = APIRouter(tags=["decisions"])
Text = Annotated[str | None, Query(max_length=256)]
Since = Annotated[datetime | None, Query(description="RFC 3339; without an offset it is UTC")]
Limit = Annotated[int, Query(ge=1, le=500)]
Cursor = Annotated[str | None, Query(max_length=400)]


@router.get("/decisions")
async def list_decisions(
    plane: PlaneDep,
    status: RequestStatus | None = None,
    model: Text = None,
    tenant: Text = None,
    worker: Text = None,
    since: Since = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> DecisionList:
    """Newest first; all filters given must match."""
    filters = Filters(status, model, tenant, worker, _utc(since))
    async with plane.db.read() as session:
        return await plane.decisions.list(session, filters, limit, cursor)


@router.get("/rejections")
async def list_rejections(
    plane: PlaneDep, since: Since = None, limit: Limit = 100, cursor: Cursor = None
) -> DecisionList:
    """The same as decisions?status=rejected."""
    async with plane.db.read() as session:
        filters = Filters(status="rejected", since=_utc(since))
        return await plane.decisions.list(session, filters, limit, cursor)


@router.get("/decisions/{request_id}")
async def get_decision(
    plane: PlaneDep, request_id: Annotated[str, Path(max_length=128)]
) -> Decision:
    async with plane.db.read() as session:
        return await plane.decisions.find(session, request_id)


@router.get("/decisions/{request_id}/prompt")
async def get_prompt(plane: PlaneDep, request_id: Annotated[str, Path(max_length=128)]) -> Prompt:
    """Block keys of the request's prompt, and its token ids where the records policy keeps them."""
    async with plane.db.read() as session:
        return await prompts.find(session, request_id)


def _utc(since: datetime | None) -> datetime | None:
    if since is None:
        return None
    check_time(since, "since")
    return since.replace(tzinfo=UTC) if since.tzinfo is None else since
