"""Reads what the pool's report is made of."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.clock import Clock
from controlplane.db.session import Database
from controlplane.nodes.pool import NodeFacts, report
from controlplane.nodes.pool_schemas import RATE_SECONDS, PoolReport
from controlplane.nodes.service import NodeRegistry
from controlplane.stats.bucket import new_bucket
from controlplane.stats.service import StatsService
from controlplane.stats.window import STEP_SECONDS


@dataclass(slots=True)
class PoolReporter:
    """Nothing is kept between reports."""

    clock: Clock
    db: Database
    nodes: NodeRegistry
    stats: StatsService

    async def build(self, window: float) -> PoolReport:
        """Windows of up to 15 min come from memory, longer ones from the database."""
        now = self.clock.now().timestamp()
        totals = await self.stats.totals(self.db, "node:*", window)
        minute = await self.stats.totals(self.db, "node:*", RATE_SECONDS)
        # the window is kept in steps: a minute's sum reaches back to the start of its first step
        oldest = now - RATE_SECONDS
        first = self.stats.window.first_at(oldest - oldest % STEP_SECONDS)
        watched = RATE_SECONDS if first is None else max(1.0, now - first)
        live = {node.id: node.stats for node in self.nodes.live()}
        facts = [
            NodeFacts(
                node.id,
                node.state,
                live.get(node.id),
                totals.get(f"node:{node.id}", new_bucket()),
                minute.get(f"node:{node.id}", new_bucket()),
                watched,
            )
            for node in self.nodes.list()
        ]
        return report(facts, now, window)
