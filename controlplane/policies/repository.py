"""Queries of policies."""

from __future__ import annotations

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.base import upsert
from controlplane.policies.tables import ActiveRow, RevisionRow


async def active(session: AsyncSession) -> list[RevisionRow]:
    query = select(RevisionRow).join(
        ActiveRow,
        (ActiveRow.kind == RevisionRow.kind)
        & (ActiveRow.scope == RevisionRow.scope)
        & (ActiveRow.revision == RevisionRow.revision),
    )
    return list(await session.scalars(query.order_by(RevisionRow.kind, RevisionRow.scope)))


async def active_revision(session: AsyncSession, kind: str, scope: str) -> int | None:
    """The pointer, locked until the transaction ends (SQLite: the whole database is)."""
    query = select(ActiveRow.revision).where(ActiveRow.kind == kind, ActiveRow.scope == scope)
    revision: int | None = await session.scalar(query.with_for_update())
    return revision


async def newest_revision(session: AsyncSession, kind: str, scope: str) -> int:
    query = select(func.max(RevisionRow.revision)).where(
        RevisionRow.kind == kind, RevisionRow.scope == scope
    )
    return int(await session.scalar(query) or 0)


async def revision(session: AsyncSession, kind: str, scope: str, number: int) -> RevisionRow | None:
    return await session.get(RevisionRow, (kind, scope, number))


async def revisions(
    session: AsyncSession, kind: str, scope: str, limit: int, before: int | None
) -> list[RevisionRow]:
    query = select(RevisionRow).where(RevisionRow.kind == kind, RevisionRow.scope == scope)
    if before is not None:
        query = query.where(RevisionRow.revision < before)
    return list(await session.scalars(query.order_by(RevisionRow.revision.desc()).limit(limit)))


async def add(session: AsyncSession, row: RevisionRow) -> None:
    """Write the revision and make it the active one."""
    session.add(row)
    await session.flush()
    pointer = {"kind": row.kind, "scope": row.scope, "revision": row.revision}
    await upsert(session, ActiveRow, [pointer], ["kind", "scope"])


async def prune(session: AsyncSession, kind: str, scope: str, keep_from: int) -> None:
    await session.execute(
        delete(RevisionRow).where(
            RevisionRow.kind == kind,
            RevisionRow.scope == scope,
            RevisionRow.revision < keep_from,
        )
    )
