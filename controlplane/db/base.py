"""Declarative base, column types and the upsert that both databases speak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import DateTime, Dialect, MetaData
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
"""Every constraint has a name: a later migration on SQLite can then find it."""

ROWS_PER_STATEMENT = 400
"""SQLite takes at most 32,766 bound values a statement."""


class Base(DeclarativeBase):
    """All tables; `controlplane.db.tables` imports every noun's."""

    metadata = MetaData(naming_convention=NAMING)


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC in Python; timestamptz on Postgres, sortable ISO text on SQLite."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        assert value.tzinfo is not None, "a naive datetime has no place in the database"
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


async def upsert(
    session: AsyncSession,
    table: type[Base],
    rows: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
) -> None:
    """Insert rows; where `keys` exist already, take the new values of all other columns."""
    dialect = session.get_bind().dialect.name
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    for first in range(0, len(rows), ROWS_PER_STATEMENT):
        chunk = [dict(row) for row in rows[first : first + ROWS_PER_STATEMENT]]
        statement = insert(table).values(chunk)
        changed = {name: statement.excluded[name] for name in chunk[0] if name not in keys}
        await session.execute(
            statement.on_conflict_do_update(index_elements=list(keys), set_=changed)
        )
