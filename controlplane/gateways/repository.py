"""Queries of gateways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.base import upsert
from controlplane.gateways.tables import GatewayRow


async def everything(session: AsyncSession) -> list[GatewayRow]:
    return list(await session.scalars(select(GatewayRow)))


async def save(session: AsyncSession, rows: Sequence[Mapping[str, Any]]) -> None:
    await upsert(session, GatewayRow, rows, ["id"])


async def remove(session: AsyncSession, gateway_ids: Iterable[str]) -> None:
    await session.execute(delete(GatewayRow).where(GatewayRow.id.in_(list(gateway_ids))))
