"""What a directory's changes add up to: the nodes, and an index of what they said they hold. Pure.

A node whose record vanishes is suspect first: a store that stood still, or lost its leader, ends
leases of nodes that are well. Only after a grace without a new registration it counts as gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from workers.core.ids import NodeId
from workers.core.prefix_index import Applied, PrefixIndex
from workers.directory.base import (
    Change,
    ListPart,
    ListTold,
    NodeGone,
    NodeRecord,
    NodeUp,
    Watching,
)

GRACE_SECONDS: Final = 30.0


@dataclass(slots=True)
class DirectoryView:
    """Feed it with `take`; call `sweep` now and then. `now`: monotonic seconds."""

    grace_seconds: float = GRACE_SECONDS
    index: PrefixIndex = field(default_factory=PrefixIndex)
    owns_index: bool = True  # False: others feed it too and decide when a node leaves it
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    suspect_since: dict[str, float] = field(default_factory=dict)
    state: str = "rebuilding"  # until all that is there has been told; then "current" or "lost"
    reason: str = ""
    list_gaps: int = 0

    def take(self, change: Change, now: float) -> None:
        match change:
            case NodeUp(record):
                self._up(record)
            case NodeGone(node_id):
                if node_id in self.nodes:
                    self.suspect_since.setdefault(node_id, now)
            case ListTold(part):
                self._told(part)
            case Watching(state, reason):
                # not yet told everything is no better than before: it stays "rebuilding"
                if state == "current" or self.state == "current":
                    self.state = state
                self.reason = reason

    def sweep(self, now: float) -> list[str]:
        """Nodes that are gone for good; while the store is silent nobody is."""
        if self.state != "current":
            self.suspect_since = dict.fromkeys(self.suspect_since, now)
            return []
        gone = [n for n, since in self.suspect_since.items() if now - since >= self.grace_seconds]
        for node_id in gone:
            del self.suspect_since[node_id]
            del self.nodes[node_id]
            if self.owns_index:
                self.index.drop_node(NodeId(node_id))
        return gone

    def _up(self, record: NodeRecord) -> None:
        known = self.nodes.get(record.node_id)
        if known is not None and known.incarnation > record.incarnation:
            return
        believed, _ = self.index.position(NodeId(record.node_id))
        if believed and believed < record.incarnation:
            self.index.drop_node(NodeId(record.node_id))
        self.nodes[record.node_id] = record
        self.suspect_since.pop(record.node_id, None)

    def _told(self, part: ListPart) -> None:
        if self.index.apply(part) is Applied.RESYNC:
            self.list_gaps += 1  # the publisher begins anew with a snapshot by itself
