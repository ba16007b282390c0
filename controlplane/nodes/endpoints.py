"""REST of nodes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from controlplane.deps import IdPath, OperatorDep, PlaneDep, TokenNeeded
from controlplane.fleet import repository as fleet_repository
from controlplane.nodes import repository
from controlplane.nodes.heartbeats import take_heartbeat
from controlplane.nodes.pool_schemas import PoolReport
from controlplane.nodes.schemas import Heartbeat, HeartbeatReply, Node, NodeList

router = APIRouter(tags=["nodes"])
MAX_WINDOW_SECONDS = 86_400


@router.get("/nodes")
async def list_nodes(plane: PlaneDep) -> NodeList:
    return NodeList(items=plane.nodes.list())


@router.get("/cache/pool")
async def pool(
    plane: PlaneDep, window: Annotated[float, Query(ge=10, le=MAX_WINDOW_SECONDS)] = 900
) -> PoolReport:
    """Tiers, tenants, namespaces, health of eviction and the what-if curve, as last reported."""
    return await plane.pool.build(window)


@router.get("/nodes/{node_id}")
async def get_node(plane: PlaneDep, node_id: IdPath) -> Node:
    return plane.nodes.to_schema(plane.nodes.find(node_id))


@router.delete("/nodes/{node_id}", status_code=204)
async def remove_node(
    plane: PlaneDep,
    operator: OperatorDep,
    node_id: IdPath,
    reason: Annotated[str, Query(max_length=500)] = "",
) -> None:
    """Take a node that is gone, and its workers, out of the picture. A ready one answers 409."""
    before = plane.nodes.to_schema(plane.nodes.removable(node_id))
    workers = plane.fleet.ids_of_node(node_id)
    async with plane.db.write() as tx:
        await repository.remove(tx.session, [node_id])
        await fleet_repository.remove(tx.session, workers)
        await plane.audit.record(
            tx,
            actor=operator.name,
            request_id=operator.request_id,
            verb="node.remove",
            target=node_id,
            before={"state": before.state, "incarnation": before.incarnation, "workers": workers},
            reason=reason,
        )

        def forget() -> None:
            plane.nodes.drop(node_id)
            plane.forget_node(node_id)

        tx.after_commit(forget)


@router.post("/nodes/{node_id}/heartbeat")
async def heartbeat(
    plane: PlaneDep, _token: TokenNeeded, node_id: IdPath, body: Heartbeat
) -> HeartbeatReply:
    """A sign of life. One of an older incarnation than the known one answers 409."""
    return await take_heartbeat(plane, node_id, body)
