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
    limit: Annotated[int, Query(ge=0, le=2000)] = 500,
    *,
    links: bool = True,
) -> NodeTransferList:
    """Per source, destination, transport and priority, since the agents started; links, alarms.

    `limit=0&links=false` is alarms alone.
    """
    now = plane.clock.monotonic()
    heard = [
        Heard(live.stats, max(0.0, now - live.seen)) for live in plane.nodes.live() if live.stats
    ]
    found = report(heard, Wanted(source, destination, node, transport, priority), limit)
    return found if links else found.model_copy(update={"links": [], "modes": []})
