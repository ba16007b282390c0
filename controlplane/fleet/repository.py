"""Queries of workers and their commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.base import upsert
from controlplane.fleet.tables import CommandRow, WorkerRow


async def everything(session: AsyncSession) -> list[WorkerRow]:
    return list(await session.scalars(select(WorkerRow)))


async def save(session: AsyncSession, rows: Sequence[Mapping[str, Any]]) -> None:
    await upsert(session, WorkerRow, rows, ["id"])


async def remove(session: AsyncSession, worker_ids: Iterable[str]) -> None:
    await session.execute(delete(WorkerRow).where(WorkerRow.id.in_(list(worker_ids))))


async def commands(session: AsyncSession) -> list[CommandRow]:
    return list(await session.scalars(select(CommandRow).order_by(CommandRow.created_at)))


async def add_command(session: AsyncSession, row: CommandRow) -> None:
    session.add(row)
    await session.flush()


async def remove_commands(session: AsyncSession, command_ids: Iterable[str]) -> None:
    await session.execute(delete(CommandRow).where(CommandRow.id.in_(list(command_ids))))
