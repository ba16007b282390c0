"""An operator ends a running request: the intent is on record before anything happens."""

from __future__ import annotations

from controlplane.deps import Actor
from controlplane.errors import ApiError
from controlplane.gateways.running_schemas import RequestCancel, RequestCancelled
from controlplane.plane import Plane


async def cancel(
    plane: Plane, operator: Actor, request_id: str, body: RequestCancel
) -> RequestCancelled:
    """Raises what `RunningRequests.cancel` raises; the trail then has a row for that too."""
    where = await plane.running.find(request_id, body.gateway)
    await _record(plane, operator, "request.cancel", request_id, {"gateway": where}, body.reason)
    try:
        return await plane.running.cancel(request_id, where, operator.name)
    except ApiError as error:
        after = {"gateway": where, "problem": str(error)}
        await _record(plane, operator, "request.cancel_failed", request_id, after, body.reason)
        raise


async def _record(
    plane: Plane, operator: Actor, verb: str, request_id: str, after: object, reason: str
) -> None:
    async with plane.db.write() as tx:
        await plane.audit.record(
            tx,
            actor=operator.name,
            request_id=operator.request_id,
            verb=verb,
            target=request_id,
            after=after,
            reason=reason,
        )
