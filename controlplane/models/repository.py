"""Queries of models."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.base import upsert
from controlplane.models.tables import ModelRow


async def everything(session: AsyncSession) -> list[ModelRow]:
    return list(await session.scalars(select(ModelRow)))


async def save(session: AsyncSession, values: dict[str, object]) -> None:
    await upsert(session, ModelRow, [values], ["id"])


async def remove(session: AsyncSession, model_id: str) -> None:
    await session.execute(delete(ModelRow).where(ModelRow.id == model_id))
