"""What the auditor found, by node and tier. Pure bookkeeping: the loop asks, this counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from controlplane.index_audit.schemas import (
    AuditState,
    CacheAudit,
    CacheResync,
    DirectoryStatus,
    NodeAudit,
    ResyncResult,
    TierAudit,
)
from workers.core.ids import NodeId
from workers.core.prefix_index import Claim, PrefixIndex
from workers.core.stats_messages import TierName

RECENT_CHECKS = 1000
"""Claims by which a tier's stale rate is told."""
RESYNC_STALE = 3
RESYNC_RATE = 0.01
"""A node is read anew when so many of its recent claims, and so great a share, were wrong."""
RESYNC_PAUSE_SECONDS = 30.0
TIERS: tuple[TierName, ...] = ("dram", "ssd")


@dataclass(slots=True)
class TierCounts:
    """Checks of one node's claims about one tier."""

    checks_total: int = 0
    stale_total: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT_CHECKS))

    def count(self, *, stale: bool) -> None:
        self.checks_total += 1
        self.stale_total += stale
        self.recent.append(stale)

    @property
    def stale_rate(self) -> float | None:
        return sum(self.recent) / len(self.recent) if self.recent else None


@dataclass(slots=True)
class NodeFindings:
    """One node's audit."""

    tiers: dict[TierName, TierCounts] = field(
        default_factory=lambda: {tier: TierCounts() for tier in TIERS}
    )
    reachable: bool = False
    last_check_at: datetime | None = None
    last_stale_at: datetime | None = None
    last_stale_key: str | None = None
    last_error: str = ""
    resyncs_total: int = 0
    resynced_at: float = float("-inf")

    def count(self, claim: Claim, *, stale: bool, at: datetime) -> None:
        self.tiers[claim.tier].count(stale=stale)
        self.last_check_at = at
        if stale:
            self.last_stale_at, self.last_stale_key = at, claim.block_hash.hex()

    def needs_resync(self, now: float) -> bool:
        """`now`: monotonic seconds."""
        recent = [stale for counts in self.tiers.values() for stale in counts.recent]
        num_stale = sum(recent)
        return (
            num_stale >= RESYNC_STALE
            and num_stale >= RESYNC_RATE * len(recent)
            and now - self.resynced_at >= RESYNC_PAUSE_SECONDS
        )

    def resynced(self, now: float) -> None:
        self.resynced_at = now
        self.resyncs_total += 1
        for counts in self.tiers.values():
            counts.recent.clear()


class Resyncer(Protocol):
    """What can read a node's claims anew: the loop that follows the nodes."""

    async def resync(self, wanted: CacheResync) -> ResyncResult:
        """NotFoundError: no such node; PeriluneError: its agent does not answer."""
        ...


class IndexAudit:
    """The control plane's own index and what is known of its quality."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.nodes: dict[str, NodeFindings] = {}
        self.directory = DirectoryStatus(state="none")

    def findings(self, node_id: str) -> NodeFindings:
        found = self.nodes.get(node_id)
        if found is None:
            found = self.nodes[node_id] = NodeFindings()
        return found

    def keep(self, node_ids: set[str]) -> None:
        """Forget nodes that are out of the registry."""
        for node_id in self.nodes.keys() - node_ids:
            del self.nodes[node_id]
            self.index.drop_node(NodeId(node_id))

    def to_schema(self) -> CacheAudit:
        return CacheAudit(
            items=[self._node(node_id, self.nodes[node_id]) for node_id in sorted(self.nodes)],
            index_blocks=self.index.num_distinct,
            index_entries=self.index.num_blocks(),
            index_dropped_total=self.index.num_dropped,
            directory=self.directory,
        )

    def _node(self, node_id: str, found: NodeFindings) -> NodeAudit:
        name = NodeId(node_id)
        known = name in self.index.nodes()
        incarnation, sequence = self.index.position(name)
        return NodeAudit(
            node_id=node_id,
            state=self.state(node_id),
            incarnation=incarnation or None,
            sequence=sequence if incarnation else None,
            blocks=self.index.num_blocks(name) if known else 0,
            blocks_on_ssd=self.index.num_on_disk(name) if known else 0,
            tiers=[_tier(tier, found.tiers[tier]) for tier in TIERS],
            last_check_at=found.last_check_at,
            last_stale_at=found.last_stale_at,
            last_stale_key=found.last_stale_key,
            resyncs_total=found.resyncs_total,
            last_error=found.last_error,
        )

    def state(self, node_id: str) -> AuditState:
        if not self.findings(node_id).reachable:
            return "unreachable"
        return "following" if self.index.position(NodeId(node_id))[0] else "resyncing"


def _tier(tier: TierName, counts: TierCounts) -> TierAudit:
    return TierAudit(
        tier=tier,
        checks_total=counts.checks_total,
        stale_total=counts.stale_total,
        recent_checks=len(counts.recent),
        stale_rate=counts.stale_rate,
    )
