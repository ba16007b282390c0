"""Queries of the audit trail."""

from __future__ import annotations

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit.tables import AuditRecord


async def add(session: AsyncSession, record: AuditRecord) -> AuditRecord:
    session.add(record)
    await session.flush()
    return record


async def newest(
    session: AsyncSession,
    *,
    limit: int,
    before_id: int | None = None,
    actor: str | None = None,
    verb: str | None = None,
    target: str | None = None,
) -> list[AuditRecord]:
    query = select(AuditRecord).order_by(AuditRecord.id.desc()).limit(limit)
    if before_id is not None:
        query = query.where(AuditRecord.id < before_id)
    for column, value in (
        (AuditRecord.actor, actor),
        (AuditRecord.verb, verb),
        (AuditRecord.target, target),
    ):
        if value is not None:
            query = query.where(column == value)
    return list(await session.scalars(query))


async def prune(session: AsyncSession, keep: int) -> None:
    newest_id = await session.scalar(select(func.max(AuditRecord.id)))
    if newest_id is not None:
        await session.execute(delete(AuditRecord).where(AuditRecord.id <= newest_id - keep))
