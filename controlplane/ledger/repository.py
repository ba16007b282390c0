"""Queries of the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, bindparam, delete, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.base import upsert
from controlplane.ledger.tables import LedgerRow


@dataclass(frozen=True, slots=True)
class LedgerFilters:
    """All given ones must match."""

    kind: str | None = None
    model: str | None = None
    tenant: str | None = None
    priority: str | None = None
    since: datetime | None = None


async def save(session: AsyncSession, rows: Sequence[Mapping[str, Any]]) -> None:
    await upsert(session, LedgerRow, rows, ["request_id"])


async def page(
    session: AsyncSession, filters: LedgerFilters, limit: int, after: tuple[datetime, str] | None
) -> list[LedgerRow]:
    query = _filtered(select(LedgerRow), filters)
    if after is not None:
        bound = (
            bindparam("after_at", after[0], LedgerRow.at.type),
            bindparam("after_id", after[1], LedgerRow.request_id.type),
        )
        query = query.where(tuple_(LedgerRow.at, LedgerRow.request_id) < tuple_(*bound))
    query = query.order_by(LedgerRow.at.desc(), LedgerRow.request_id.desc()).limit(limit)
    return list(await session.scalars(query))


async def judged(
    session: AsyncSession, model: str, gate: str, until: datetime, limit: int
) -> list[LedgerRow]:
    """The newest probes of a model and gate whose end is known."""
    query = select(LedgerRow).where(
        LedgerRow.kind == "probe",
        LedgerRow.model == model,
        LedgerRow.gate == gate,
        LedgerRow.met.is_not(None),
        LedgerRow.at <= until,
    )
    return list(await session.scalars(query.order_by(LedgerRow.at.desc()).limit(limit)))


async def counts(
    session: AsyncSession, filters: LedgerFilters
) -> list[tuple[str, str, bool | None, int]]:
    """(priority, kind, met, how many)."""
    columns = (LedgerRow.priority, LedgerRow.kind, LedgerRow.met)
    counted: Any = select(*columns, func.count())
    query = _filtered(counted, filters).group_by(*columns)
    return [(row[0], row[1], row[2], row[3]) for row in await session.execute(query)]


async def causes(
    session: AsyncSession, filters: LedgerFilters, limit: int
) -> list[tuple[str, str | None, int, datetime]]:
    """(gate, policy, how many it turned away, when last), the last one first."""
    last = func.max(LedgerRow.at)
    columns = (LedgerRow.gate, LedgerRow.policy)
    counted: Any = select(*columns, func.count(), last).where(LedgerRow.kind != "probe")
    query = _filtered(counted, filters).group_by(*columns).order_by(last.desc()).limit(limit)
    return [(row[0], row[1], row[2], row[3]) for row in await session.execute(query)]


async def prune(session: AsyncSession, oldest: datetime, keep: int) -> None:
    """Drop what is older than `oldest`, and all but the newest `keep`."""
    await session.execute(delete(LedgerRow).where(LedgerRow.at < oldest))
    edge = select(LedgerRow.at).order_by(LedgerRow.at.desc()).offset(keep).limit(1)
    limit: datetime | None = await session.scalar(edge)
    if limit is not None:
        await session.execute(delete(LedgerRow).where(LedgerRow.at <= limit))


def _filtered(query: Select[Any], filters: LedgerFilters) -> Select[Any]:
    for column, value in (
        (LedgerRow.kind, filters.kind),
        (LedgerRow.model, filters.model),
        (LedgerRow.tenant, filters.tenant),
        (LedgerRow.priority, filters.priority),
    ):
        if value is not None:
            query = query.where(column == value)
    if filters.since is not None:
        query = query.where(LedgerRow.at >= filters.since)
    return query
