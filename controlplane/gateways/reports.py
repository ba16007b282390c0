"""What a gateway's report changes: its row, the statistics, the decision records."""

from __future__ import annotations

from controlplane.gateways.schemas import GatewayReport, ReportReply
from controlplane.plane import Plane


async def take_report(plane: Plane, gateway_id: str, body: GatewayReport) -> ReportReply:
    """Memory first; decisions are on disk when this returns."""
    gateway = plane.gateways.report(gateway_id, body)
    plane.view.acknowledge(gateway_id, body.view_revision)
    plane.stats.collector.gateway_sample(gateway_id, body.stats, plane.clock.now().timestamp())
    plane.announcer.gateways([plane.gateways.to_schema(gateway)])
    stored = 0
    if body.decisions:
        async with plane.db.write() as tx:
            stored = await plane.decisions.store(tx, body.decisions)
            await plane.ledger.record(tx.session, body.decisions)
    return ReportReply(stored=stored, view_revision=plane.view.revision)
