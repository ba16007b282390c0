"""REST of the index's audit."""

from __future__ import annotations

from fastapi import APIRouter

from controlplane.deps import OperatorDep, PlaneDep
from controlplane.errors import ApiError, UnavailableError
from controlplane.index_audit.schemas import CacheAudit, CacheResync, ResyncResult
from workers.core.errors import PeriluneError

router = APIRouter(tags=["cache"])


@router.get("/cache/audit")
async def get_audit(plane: PlaneDep) -> CacheAudit:
    """How true the index is: stale claims by node and tier, found by asking the nodes at random."""
    return plane.index_audit.to_schema()


@router.post("/cache/audit/resync")
async def resync(plane: PlaneDep, operator: OperatorDep, body: CacheResync) -> ResyncResult:
    """Read a node's claims anew, or compare one key with the node now."""
    plane.nodes.find(body.node_id)
    if plane.resyncer is None:
        raise UnavailableError(
            "The auditor does not run yet.", way_out="Try again in a second.",
            headers={"Retry-After": "1"},
        )  # fmt: skip
    try:
        result = await plane.resyncer.resync(body)
    except ApiError:
        raise
    except PeriluneError as error:
        raise UnavailableError(
            f"{error}", field="node_id", value=body.node_id,
            way_out="See whether its agent runs (perilune get nodes), then try again.",
        ) from error  # fmt: skip
    async with plane.db.write() as tx:
        await plane.audit.record(
            tx,
            actor=operator.name,
            request_id=operator.request_id,
            verb="cache.resync",
            target=body.node_id if body.key is None else f"{body.node_id}/{body.key}",
            after=result.model_dump(mode="json"),
            reason=body.reason,
        )
    return result
