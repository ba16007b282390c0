"""Queries of decision records and leg reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, bindparam, delete, func, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.base import upsert
from controlplane.decisions.tables import DecisionRow, LegRow


@dataclass(frozen=True, slots=True)
class Filters:
    """All given ones must match; `worker` is either leg's."""

    status: str | None = None
    model: str | None = None
    tenant: str | None = None
    worker: str | None = None
    since: datetime | None = None


async def by_ids(session: AsyncSession, request_ids: Iterable[str]) -> list[DecisionRow]:
    query = select(DecisionRow).where(DecisionRow.request_id.in_(list(request_ids)))
    return list(await session.scalars(query))


async def by_transfers(session: AsyncSession, transfer_ids: Iterable[str]) -> list[DecisionRow]:
    query = select(DecisionRow).where(DecisionRow.transfer_id.in_(list(transfer_ids)))
    return list(await session.scalars(query))


async def page(
    session: AsyncSession, filters: Filters, limit: int, after: tuple[datetime, str] | None
) -> list[DecisionRow]:
    query = _filtered(select(DecisionRow), filters)
    if after is not None:
        query = query.where(tuple_(DecisionRow.at, DecisionRow.request_id) < tuple_(*_bound(after)))
    query = query.order_by(DecisionRow.at.desc(), DecisionRow.request_id.desc()).limit(limit)
    return list(await session.scalars(query))


async def count(session: AsyncSession, filters: Filters) -> int:
    query = _filtered(select(func.count()).select_from(DecisionRow), filters)
    return int(await session.scalar(query) or 0)


def _bound(after: tuple[datetime, str]) -> tuple[Any, Any]:
    return (
        bindparam("after_at", after[0], DecisionRow.at.type),
        bindparam("after_id", after[1], DecisionRow.request_id.type),
    )


def _filtered(query: Select[Any], filters: Filters) -> Select[Any]:
    for column, value in (
        (DecisionRow.status, filters.status),
        (DecisionRow.model, filters.model),
        (DecisionRow.tenant, filters.tenant),
    ):
        if value is not None:
            query = query.where(column == value)
    if filters.worker is not None:
        query = query.where(
            or_(
                DecisionRow.prefill_worker == filters.worker,
                DecisionRow.decode_worker == filters.worker,
            )
        )
    if filters.since is not None:
        query = query.where(DecisionRow.at >= filters.since)
    return query


async def save(session: AsyncSession, rows: Sequence[Mapping[str, Any]]) -> None:
    await upsert(session, DecisionRow, rows, ["request_id"])


async def mark_counted(session: AsyncSession, request_ids: list[str]) -> None:
    await session.execute(
        update(DecisionRow).where(DecisionRow.request_id.in_(request_ids)).values(kv_counted=True)
    )


async def legs_of(session: AsyncSession, transfer_ids: Iterable[str]) -> list[LegRow]:
    query = select(LegRow).where(LegRow.transfer_id.in_(list(transfer_ids)))
    return list(await session.scalars(query))


async def save_legs(session: AsyncSession, rows: Sequence[Mapping[str, Any]]) -> None:
    await upsert(session, LegRow, rows, ["transfer_id", "worker_id", "kv_role"])


async def prune(session: AsyncSession, oldest: datetime, keep: int) -> None:
    """Drop what is older than `oldest`, and all but the newest `keep`."""
    await session.execute(delete(DecisionRow).where(DecisionRow.at < oldest))
    await session.execute(delete(LegRow).where(LegRow.at < oldest))
    for table, number in ((DecisionRow, keep), (LegRow, 2 * keep)):
        edge = select(table.at).order_by(table.at.desc()).offset(number).limit(1)
        limit: datetime | None = await session.scalar(edge)
        if limit is not None:
            await session.execute(delete(table).where(table.at <= limit))
