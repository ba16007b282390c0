"""What a heartbeat changes: the node, its workers, the statistics, the legs' reports."""

from __future__ import annotations

from controlplane.fleet import repository as fleet_repository
from controlplane.nodes.schemas import Heartbeat, HeartbeatReply
from controlplane.nodes.wire import leg_reports, pool_stats
from controlplane.plane import Plane
from controlplane.policies.service import DEFAULT_SCOPE
from workers.core.messages import LegReport
from workers.core.stats_messages import PoolStats


async def take_heartbeat(plane: Plane, node_id: str, body: Heartbeat) -> HeartbeatReply:
    """Nothing is changed if any part of it cannot be read. Leg reports are on disk when this
    returns, so that the agent may forget them."""
    stats = None
    if body.pool_stats is not None:
        stats = pool_stats(body.pool_stats, node_id, body.incarnation)
    legs = leg_reports(body.leg_reports)
    _apply(plane, node_id, body, stats)
    plane.stats.collector.prefill_legs(node_id, legs)
    await _persist(plane, node_id, body, legs)
    policy = plane.policies.active["cache", DEFAULT_SCOPE]
    transfer = plane.policies.active["transfer", DEFAULT_SCOPE]
    return HeartbeatReply(
        commands=plane.commands.for_node(node_id),
        cache_policy_revision=policy.revision,
        cache_policy=policy.spec,
        transfer_policy_revision=transfer.revision,
        transfer_policy=transfer.spec,
    )


def _apply(plane: Plane, node_id: str, body: Heartbeat, stats: PoolStats | None) -> None:
    node = plane.nodes.heartbeat(node_id, body.incarnation, body.events_endpoint)
    concerned = set(plane.fleet.ids_of_node(node_id))
    if stats is not None:
        namespaces = [info.digest.hex() for info in stats.namespaces]
        plane.nodes.take_stats(node, stats, namespaces)
        concerned |= plane.fleet.report(node_id, stats.workers, stats.namespaces)
        plane.stats.collector.node_sample(stats, plane.clock.now().timestamp())
    plane.announcer.nodes([plane.nodes.to_schema(node)])
    plane.announcer.workers(plane.fleet.list(concerned))


async def _persist(plane: Plane, node_id: str, body: Heartbeat, legs: list[LegReport]) -> None:
    done = plane.commands.known(node_id, body.acknowledged_commands)
    if not done and not legs:
        return
    async with plane.db.write() as tx:
        if done:
            await fleet_repository.remove_commands(tx.session, done)
            tx.after_commit(lambda: plane.commands.forget(done))
        if legs:
            await plane.decisions.store_legs(tx, legs)
