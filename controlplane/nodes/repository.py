"""Queries of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.base import upsert
from controlplane.nodes.tables import NodeRow


async def everything(session: AsyncSession) -> list[NodeRow]:
    return list(await session.scalars(select(NodeRow)))


async def save(session: AsyncSession, rows: Sequence[Mapping[str, Any]]) -> None:
    await upsert(session, NodeRow, rows, ["id"])


async def remove(session: AsyncSession, node_ids: Iterable[str]) -> None:
    await session.execute(delete(NodeRow).where(NodeRow.id.in_(list(node_ids))))
