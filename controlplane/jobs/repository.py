"""Queries of jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.jobs.schemas import LIVE_STATES
from controlplane.jobs.tables import JobRow


async def add(session: AsyncSession, row: JobRow) -> JobRow:
    session.add(row)
    await session.flush()
    return row


async def change(session: AsyncSession, job_id: int, values: Mapping[str, Any]) -> None:
    await session.execute(update(JobRow).where(JobRow.id == job_id).values(**values))


async def get(session: AsyncSession, job_id: int) -> JobRow | None:
    return await session.get(JobRow, job_id)


async def live(session: AsyncSession) -> list[JobRow]:
    """Those that have not ended, oldest first."""
    query = select(JobRow).where(JobRow.state.in_(LIVE_STATES)).order_by(JobRow.id)
    return list(await session.scalars(query))


async def newest(
    session: AsyncSession,
    *,
    limit: int,
    before_id: int | None = None,
    states: Iterable[str] = (),
    kind: str | None = None,
) -> list[JobRow]:
    query = select(JobRow).order_by(JobRow.id.desc()).limit(limit)
    if before_id is not None:
        query = query.where(JobRow.id < before_id)
    if states:
        query = query.where(JobRow.state.in_(list(states)))
    if kind is not None:
        query = query.where(JobRow.kind == kind)
    return list(await session.scalars(query))


async def prune(session: AsyncSession, keep: int) -> None:
    """Keep the newest; what has not ended stays whatever its age."""
    newest_id = await session.scalar(select(func.max(JobRow.id)))
    if newest_id is not None:
        old = JobRow.id <= newest_id - keep
        await session.execute(delete(JobRow).where(old, JobRow.state.not_in(LIVE_STATES)))
