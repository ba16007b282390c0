"""Nodes as they are now. Memory is the truth while we run; the database is for the next start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock
from controlplane.db.session import Transaction
from controlplane.errors import ConflictError, NotFoundError, UnavailableError
from controlplane.nodes import repository
from controlplane.nodes.schemas import Node, NodeState
from controlplane.nodes.state import LOST_SECONDS, READY_SECONDS, Grace, node_state
from workers.core.stats_messages import PoolStats

MAX_NODES = 2000
MAX_LOST_NODES = 200
"""Lost nodes kept in the list; beyond it the one lost longest is dropped."""
SAVE_SECONDS = 5.0
"""How often a heartbeat's time reaches the database when nothing else changed."""


@dataclass(slots=True)
class LiveNode:
    """One node, whatever its incarnations. `seen` is monotonic; `stats` only of this life."""

    id: str
    incarnation: int
    restarts: int
    joined_at: datetime
    last_heartbeat_at: datetime
    seen: float
    state: NodeState = "ready"
    events_endpoint: str = ""
    namespaces: list[str] = field(default_factory=list)
    block_tokens: int | None = None
    stats: PoolStats | None = None
    index_epoch: int = 0  # grows when what is believed of it shall be read anew
    saved: float = float("-inf")
    dirty: bool = True

    def facts(self) -> dict[str, object]:
        return {
            "events_endpoint": self.events_endpoint,
            "namespaces": self.namespaces,
            "block_tokens": self.block_tokens,
            "lost": self.state == "lost",
        }


class NodeRegistry:
    """Every node that was ever heard of and not dropped since; at most `MAX_NODES`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._nodes: dict[str, LiveNode] = {}
        self._removed: set[str] = set()
        self._grace = Grace(clock.monotonic())

    async def load(self, session: AsyncSession) -> None:
        now, mono = self._clock.now(), self._clock.monotonic()
        for row in await repository.everything(session):
            age = max(0.0, (now - row.last_heartbeat_at).total_seconds())
            facts: dict[str, Any] = dict(row.facts)
            node = LiveNode(
                id=row.id,
                incarnation=row.incarnation,
                restarts=row.restarts,
                joined_at=row.joined_at,
                last_heartbeat_at=row.last_heartbeat_at,
                seen=mono - age,
                state="lost" if facts.get("lost") else "stale",
                events_endpoint=str(facts.get("events_endpoint", "")),
                namespaces=list(facts.get("namespaces", [])),
                block_tokens=facts.get("block_tokens"),
                dirty=False,
            )
            self._nodes[row.id] = node

    def heartbeat(self, node_id: str, incarnation: int, endpoint: str) -> LiveNode:
        """Take a sign of life. A life older than the known one is refused with both named."""
        now, mono = self._clock.now(), self._clock.monotonic()
        node = self._nodes.get(node_id)
        if node is None:
            node = self._join(node_id, incarnation, now, mono)
        elif incarnation < node.incarnation:
            raise ConflictError(
                f"Node {node_id} is known by incarnation {node.incarnation}; "
                f"{incarnation} is an older life of it.",
                field="incarnation",
                value=incarnation,
                way_out="An older agent of the same name still runs: stop it, or rename one.",
            )
        elif incarnation > node.incarnation:
            node.incarnation, node.restarts = incarnation, node.restarts + 1
            node.joined_at, node.stats, node.dirty = now, None, True
        if node.state != "ready" or node.events_endpoint != endpoint:
            node.dirty = True
        node.last_heartbeat_at, node.seen = now, mono
        node.state, node.events_endpoint = "ready", endpoint
        return node

    def _join(self, node_id: str, incarnation: int, now: datetime, mono: float) -> LiveNode:
        if len(self._nodes) >= MAX_NODES:
            raise UnavailableError(
                f"{MAX_NODES} nodes are known, which is the limit.",
                field="node_id",
                value=node_id,
                way_out="Remove lost nodes: perilune node remove NODE.",
            )
        node = LiveNode(node_id, incarnation, 0, now, now, mono)
        self._nodes[node_id] = node
        self._removed.discard(node_id)
        return node

    def take_stats(self, node: LiveNode, stats: PoolStats, namespaces: list[str]) -> None:
        """The pool's numbers of this heartbeat."""
        tokens = sorted({info.spec.block_tokens for info in stats.namespaces})
        block_tokens = tokens[0] if tokens else node.block_tokens
        if (namespaces, block_tokens) != (node.namespaces, node.block_tokens):
            node.namespaces, node.block_tokens, node.dirty = namespaces, block_tokens, True
        node.stats = stats

    def read_index_anew(self, node_id: str) -> None:
        """Have gateways ask this node for a snapshot; unknown ones are fine."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.index_epoch += 1

    def sweep(self) -> list[str]:
        """Recompute states and drop the lost beyond the bound; returns the ids dropped."""
        mono = self._clock.monotonic()
        grace = self._grace.look(mono)
        for node in self._nodes.values():
            state = node_state(max(0.0, mono - node.seen))
            if state == "lost" and grace and node.state != "lost":
                state = "stale"
            if state != node.state:
                node.state, node.dirty = state, True
        lost = sorted((n.seen, n.id) for n in self._nodes.values() if n.state == "lost")
        dropped = [node_id for _, node_id in lost[: max(0, len(lost) - MAX_LOST_NODES)]]
        for node_id in dropped:
            self.drop(node_id)
        return dropped

    def drop(self, node_id: str) -> None:
        self._nodes.pop(node_id, None)
        self._removed.add(node_id)

    def find(self, node_id: str) -> LiveNode:
        node = self._nodes.get(node_id)
        if node is None:
            known = ", ".join(sorted(self._nodes)[:10]) or "none"
            raise NotFoundError(
                f"No node {node_id!r}.",
                field="node_id",
                value=node_id,
                way_out=f"Known nodes: {known}.",
            )
        return node

    def removable(self, node_id: str) -> LiveNode:
        """The node, if it may be removed by hand: not while its agent is heard."""
        node = self.find(node_id)
        if node.state == "ready":
            raise ConflictError(
                f"Node {node_id} is ready: its agent would join again at once.",
                field="node_id",
                value=node_id,
                way_out=f"Stop its agent first; it may be removed {READY_SECONDS:.0f} s later.",
            )
        return node

    def state_of(self, node_id: str) -> NodeState | None:
        node = self._nodes.get(node_id)
        return node.state if node else None

    def live(self) -> list[LiveNode]:
        """Nodes whose numbers count: not lost, and heard of in this life of ours."""
        return [node for node in self._nodes.values() if node.state != "lost" and node.stats]

    def list(self) -> list[Node]:
        return [self.to_schema(self._nodes[node_id]) for node_id in sorted(self._nodes)]

    def to_schema(self, node: LiveNode) -> Node:
        stats = node.stats
        lacks = stats.transfers.not_ready if stats else ""
        return Node(
            id=node.id,
            state="not_ready" if node.state == "ready" and lacks else node.state,
            not_ready=lacks,
            transfer_problem=stats.transfers.problem if stats else "",
            incarnation=node.incarnation,
            restarts=node.restarts,
            joined_at=node.joined_at,
            last_heartbeat_at=node.last_heartbeat_at,
            heartbeat_age_seconds=round(max(0.0, self._clock.monotonic() - node.seen), 3),
            events_endpoint=node.events_endpoint,
            index_epoch=node.index_epoch,
            block_tokens=node.block_tokens,
            namespaces=node.namespaces,
            slab_bytes=stats.slab_bytes if stats else None,
            used_blocks=stats.used_blocks if stats else None,
            capacity_blocks=stats.capacity_blocks if stats else None,
            pinned_blocks=stats.pinned_blocks if stats else None,
            block_bytes=stats.block_bytes if stats else None,
            rss_bytes=stats.rss_bytes if stats else None,
            write_queue_blocks=stats.write_queue_blocks if stats else None,
            write_queue_bound=stats.write_queue_bound if stats else None,
        )

    async def save(self, tx: Transaction) -> None:
        """Write what changed; a plain heartbeat's time only every few seconds."""
        mono = self._clock.monotonic()
        removed, self._removed = self._removed, set()
        due = [n for n in self._nodes.values() if n.dirty or _time_is_due(n, mono)]
        rows = [_row(node) for node in due]
        for node in due:  # now, not after the commit: what changes meanwhile is dirty again
            node.dirty, node.saved = False, mono

        def restore() -> None:
            self._removed |= removed
            for node in due:
                node.dirty = True

        tx.after_failure(restore)
        if removed:
            await repository.remove(tx.session, removed)
        if rows:
            await repository.save(tx.session, rows)


def _time_is_due(node: LiveNode, mono: float) -> bool:
    return mono - node.saved >= SAVE_SECONDS and mono - node.seen < SAVE_SECONDS + LOST_SECONDS


def _row(node: LiveNode) -> Mapping[str, Any]:
    return {
        "id": node.id,
        "incarnation": node.incarnation,
        "restarts": node.restarts,
        "joined_at": node.joined_at,
        "last_heartbeat_at": node.last_heartbeat_at,
        "facts": node.facts(),
    }
