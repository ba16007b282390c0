"""REST of the ledger of would-be rejections."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query

from controlplane.deps import PlaneDep
from controlplane.ledger.repository import LedgerFilters
from controlplane.ledger.schemas import EntryKind, LedgerList, LedgerSummary
from controlplane.ledger.service import KEEP_DAYS
from controlplane.plane import Plane

router = APIRouter(tags=["ledger"])
Name = Annotated[str | None, Query(max_length=256, pattern=r"^[^\x00]*$")]
Window = Annotated[float, Query(ge=1, le=KEEP_DAYS * 86_400, description="seconds back from now")]


@router.get("/ledger")
async def list_ledger(
    plane: PlaneDep,
    kind: EntryKind | None = None,
    model: Name = None,
    tenant: Name = None,
    priority: Name = None,
    window: Window = 86_400,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[str | None, Query(max_length=400)] = None,
) -> LedgerList:
    """Newest first; all filters given must match."""
    filters = _filters(plane, window, kind, model, tenant, priority)
    async with plane.db.read() as session:
        return await plane.ledger.page(session, filters, limit, cursor)


@router.get("/ledger/summary")
async def ledger_summary(
    plane: PlaneDep,
    model: Name = None,
    tenant: Name = None,
    priority: Name = None,
    window: Window = 3600,
) -> LedgerSummary:
    """How many were turned away, and what share of that was wrong."""
    filters = _filters(plane, window, None, model, tenant, priority)
    async with plane.db.read() as session:
        return await plane.ledger.summary(session, filters, window)


def _filters(
    plane: Plane,
    window: float,
    kind: str | None,
    model: str | None,
    tenant: str | None,
    priority: str | None,
) -> LedgerFilters:
    since = plane.clock.now() - timedelta(seconds=window)
    return LedgerFilters(kind, model, tenant, priority, since)
