"""Queries of client keys."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.tokens.tables import KeyRow


async def everything(session: AsyncSession) -> list[KeyRow]:
    return list(await session.scalars(select(KeyRow).order_by(KeyRow.id)))


async def add(session: AsyncSession, row: KeyRow) -> KeyRow:
    session.add(row)
    await session.flush()
    return row


async def remove(session: AsyncSession, key_id: int) -> None:
    await session.execute(delete(KeyRow).where(KeyRow.id == key_id))
