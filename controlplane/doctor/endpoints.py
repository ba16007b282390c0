"""REST of the doctor. A run probes, so it is audited; reading its report changes nothing."""

from __future__ import annotations

from fastapi import APIRouter, status

from controlplane.deps import OperatorDep, PlaneDep
from controlplane.doctor.schemas import DoctorReport, DoctorRun
from controlplane.errors import InvalidError

router = APIRouter(tags=["doctor"], prefix="/doctor")


@router.get("")
async def last(plane: PlaneDep) -> DoctorReport:
    """The last run, or the one under way."""
    return plane.doctor.report


@router.post("", status_code=status.HTTP_202_ACCEPTED)
async def run(plane: PlaneDep, operator: OperatorDep, body: DoctorRun) -> DoctorReport:
    """Begin to check nodes and to probe pairs; GET tells how far it is."""
    if body.node is not None and body.pair is not None:
        raise InvalidError(
            "pair: cannot be given together with node.",
            field="pair",
            value=body.pair,
            way_out="Give one of the two.",
        )
    plan = await plane.doctor.plan(body)
    async with plane.db.write() as tx:
        await plane.audit.record(
            tx,
            actor=operator.name,
            request_id=operator.request_id,
            verb="doctor.run",
            target=body.pair or body.node or "all",
            after={"nodes": len(plan.asked), "pairs": len(plan.pairs), "max_bytes": body.max_bytes},
            reason=body.reason,
        )
    return plane.doctor.begin(plan, operator.name)
