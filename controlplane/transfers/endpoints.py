"""REST of transfers between nodes. The matrix of all pairs over time is under stats."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from controlplane.deps import PlaneDep
from controlplane.transfers.report import Heard, Wanted, report
from controlplane.transfers.schemas import NodeTransferList

router = APIRouter(tags=["transfers"], prefix="/transfers")
NodeQuery = Annotated[str | None, Query(max_length=128)]


@router.get("/nodes")
async def nodes(
    plane: PlaneDep,
    source: NodeQuery = None,
    destination: NodeQuery = None,
    node: NodeQuery = None,
    transport: Annotated[str | None, Query(max_length=16)] = None,
    priority: Literal["first_token", "batch"] | None = None,
    limit: Annotated[int, Query(ge=1, le=2000)] = 500,
) -> NodeTransferList:
    """Per source, destination, transport and priority, since the agents started; links, alarms."""
    now = plane.clock.monotonic()
    heard = [
        Heard(live.stats, max(0.0, now - live.seen)) for live in plane.nodes.live() if live.stats
    ]
    return report(heard, Wanted(source, destination, node, transport, priority), limit)
