"""What the next report would tell."""

from __future__ import annotations

import asyncio

from controlplane.gateway.records import MAX_PER_REPORT, Records
from controlplane.gateway.wire import Decision

PATIENCE_SECONDS = 20.0


def reported(records: Records) -> list[Decision]:
    """All of it; then it has been told."""
    records.announce()
    taken = (records.take() for _ in range(MAX_PER_REPORT))
    return [one for one in taken if one is not None]


async def ended(records: Records, count: int) -> list[Decision]:
    """The records of `count` requests, in the order of their ends: a client has its answer before
    its request's books are closed."""
    told: dict[str, Decision] = {}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            for one in reported(records):
                if one.status != "running":
                    told[one.request_id] = one
            if len(told) >= count:
                return list(told.values())
            await asyncio.sleep(0.005)
