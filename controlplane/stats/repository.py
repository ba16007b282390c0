"""Queries of statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.base import upsert
from controlplane.stats.bucket import Bucket, decode, encode
from controlplane.stats.tables import StatRow

MAX_ROWS = 400_000


@dataclass(frozen=True, slots=True)
class Point:
    """One bucket of one source, `at` its start in seconds since the epoch."""

    resolution: int
    source: str
    at: int
    bucket: Bucket


async def save(session: AsyncSession, points: Iterable[Point]) -> None:
    rows = [
        {
            "resolution": point.resolution,
            "source": point.source,
            "at": point.at,
            "data": encode(point.bucket),
        }
        for point in points
    ]
    if rows:
        await upsert(session, StatRow, rows, ["resolution", "source", "at"])


async def between(
    session: AsyncSession, resolution: int, selectors: list[str] | None, start: int, end: int
) -> list[Point]:
    """Points with start <= at < end; a selector is a source, or a prefix ending in `*`."""
    query = select(StatRow.source, StatRow.at, StatRow.data).where(
        StatRow.resolution == resolution, StatRow.at >= start, StatRow.at < end
    )
    if selectors is not None:
        query = query.where(or_(*(_matches(selector) for selector in selectors)))
    rows = await session.execute(query.order_by(StatRow.at).limit(MAX_ROWS))
    return [Point(resolution, source, at, decode(data)) for source, at, data in rows]


def _matches(selector: str):  # type: ignore[no-untyped-def]  # SQLAlchemy's expression type
    if selector.endswith("*"):
        prefix = selector[:-1]
        return (StatRow.source >= prefix) & (
            StatRow.source < prefix[:-1] + chr(ord(prefix[-1]) + 1)
        )
    return StatRow.source == selector


async def prune(session: AsyncSession, resolution: int, before: int) -> None:
    await session.execute(
        delete(StatRow).where(StatRow.resolution == resolution, StatRow.at < before)
    )
