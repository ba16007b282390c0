"""How gateways read the cluster (a long poll) and report to the control plane."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from controlplane.deps import IdPath, OperatorDep, PlaneDep, TokenNeeded
from controlplane.gateways.cancelling import cancel
from controlplane.gateways.reports import take_report
from controlplane.gateways.running_schemas import RequestCancel, RequestCancelled, RunningList
from controlplane.gateways.schemas import (
    ClusterView,
    Gateway,
    GatewayList,
    GatewayReport,
    ReportReply,
)

router = APIRouter(tags=["gateways"])
MAX_WAIT_SECONDS = 60.0


@router.get("/gateways")
async def list_gateways(plane: PlaneDep) -> GatewayList:
    return GatewayList(items=plane.gateways.list())


@router.get("/gateways/{gateway_id}")
async def get_gateway(plane: PlaneDep, gateway_id: IdPath) -> Gateway:
    return plane.gateways.to_schema(plane.gateways.find(gateway_id))


@router.post("/gateways/{gateway_id}/report")
async def report(
    plane: PlaneDep, _token: TokenNeeded, gateway_id: IdPath, body: GatewayReport
) -> ReportReply:
    """Statistics and decisions. Once this answers, the decisions are stored: do not send them
    again (sending them again does no harm)."""
    return await take_report(plane, gateway_id, body)


@router.get("/requests", tags=["requests"])
async def running_requests(
    plane: PlaneDep, limit: Annotated[int, Query(ge=1, le=1000)] = 200
) -> RunningList:
    """What runs now, what each request waits for, and what the policy will do about it. The gateways
    are asked, 2 s each at most; what a silent one said last stays, marked with its age."""
    return await plane.running.list(limit)


@router.post("/requests/{request_id}/cancel", tags=["requests"])
async def cancel_request(
    plane: PlaneDep, operator: OperatorDep, request_id: IdPath, body: RequestCancel
) -> RequestCancelled:
    """End a running request: its client gets 503 `cancelled_by_operator`, or an error event in its
    stream. The audit row is written first; a second one says so where it could not be done."""
    return await cancel(plane, operator, request_id, body)


@router.get(
    "/view",
    response_model=ClusterView,
    responses={304: {"description": "nothing newer within `wait` seconds"}},
)
async def view(
    plane: PlaneDep,
    gateway: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")] = None,
    after: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)] = 25.0,
) -> ClusterView | Response:
    """The cluster, once its revision is another than `after`. `after` acknowledges it."""
    if gateway is not None and after is not None:
        plane.view.acknowledge(gateway, after)
    if not await plane.view.newer_than(after, wait):
        return Response(status_code=304)
    return plane.cluster_view()
