"""Which node holds which blocks, as told by the nodes' KV events.

Entries are beliefs tagged (node, incarnation, sequence). What a node holds is prefix-closed, so
the longest held prefix of a chain is found by galloping: about ten set look-ups for 500 blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from workers.core.ids import BlockHash, Incarnation, NodeId
from workers.core.messages import (
    AllBlocksCleared,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    KvEvent,
    Snapshot,
)


class Applied(StrEnum):
    """What became of a message."""

    APPLIED = "applied"
    STALE = "stale"  # of an old incarnation, or known already: ignored
    RESYNC = "resync"  # something was missed: ask the node for a snapshot


_NamespaceBlocks = dict[bytes, set[bytes]]


@dataclass(slots=True)
class _Node:
    incarnation: int
    sequence: int
    blocks: _NamespaceBlocks = field(default_factory=dict)
    staged: _NamespaceBlocks | None = None  # parts of a snapshot that has not ended yet
    synced: bool = True


class PrefixIndex:
    """Beliefs about many nodes. No method blocks; no result refers to inner state.

    After `RESYNC` the old beliefs stay in use (a wrong one costs a miss, never a wrong answer)
    until a snapshot replaces them; a new incarnation drops them at once.
    """

    def __init__(self) -> None:
        self._nodes: dict[NodeId, _Node] = {}

    def apply(self, message: EventBatch | Snapshot) -> Applied:
        """Take in what a node sent, in the order it came."""
        match message:
            case EventBatch():
                return self._apply_batch(message)
            case Snapshot():
                return self._apply_snapshot(message)

    def held_lengths(
        self,
        namespace: bytes,
        block_hashes: Sequence[BlockHash],
        nodes: Collection[NodeId] | None = None,
    ) -> dict[NodeId, int]:
        """For each node (or each known one of `nodes`): blocks it holds from the chain's head."""
        lengths: dict[NodeId, int] = {}
        for node_id in self._nodes if nodes is None else nodes:
            node = self._nodes.get(node_id)
            if node is not None:
                held = node.blocks.get(namespace)
                lengths[node_id] = held_prefix(held.__contains__, block_hashes) if held else 0
        return lengths

    def position(self, node_id: NodeId) -> tuple[Incarnation, int]:
        """(incarnation, sequence) to subscribe from; (0, 0) asks for a snapshot."""
        node = self._nodes.get(node_id)
        if node is None or not node.synced:
            return Incarnation(0), 0
        return Incarnation(node.incarnation), node.sequence

    def drop_node(self, node_id: NodeId) -> None:
        """Forget a node; unknown ones are fine."""
        self._nodes.pop(node_id, None)

    def nodes(self) -> list[NodeId]:
        return list(self._nodes)

    def num_blocks(self, node_id: NodeId | None = None) -> int:
        """Blocks held by one node, or entries over all of them."""
        nodes = self._nodes.values() if node_id is None else [self._nodes[node_id]]
        return sum(len(held) for node in nodes for held in node.blocks.values())

    def _apply_batch(self, batch: EventBatch) -> Applied:
        node = self._current(NodeId(batch.node_id), batch.incarnation)
        if node is None:
            return Applied.STALE
        first = batch.sequence - len(batch.events) + 1
        if not node.synced or first > node.sequence + 1:
            node.synced = False
            return Applied.RESYNC
        if batch.sequence <= node.sequence:
            return Applied.STALE
        for event in batch.events[node.sequence + 1 - first :]:
            _apply_event(node.blocks, event)
        node.sequence = batch.sequence
        return Applied.APPLIED

    def _apply_snapshot(self, part: Snapshot) -> Applied:
        node = self._current(NodeId(part.node_id), part.incarnation)
        if node is None:
            return Applied.STALE
        if part.first:
            node.staged = {}
        if node.staged is None:
            node.synced = False
            return Applied.RESYNC
        for run in part.runs:
            _apply_event(node.staged, run)
        if part.last:
            node.blocks, node.staged = node.staged, None
            node.sequence, node.synced = part.sequence, True
        return Applied.APPLIED

    def _current(self, node_id: NodeId, incarnation: int) -> _Node | None:
        """The node in this incarnation, fresh and empty if it is new; None for an older one."""
        node = self._nodes.get(node_id)
        if node is None or incarnation > node.incarnation:
            node = self._nodes[node_id] = _Node(incarnation, sequence=0)
        return node if node.incarnation == incarnation else None


def held_prefix(holds: Callable[[bytes], bool], block_hashes: Sequence[bytes]) -> int:
    """Length of the prefix of `block_hashes` that `holds` says yes to; it must be prefix-closed."""
    num_blocks = len(block_hashes)
    low, high = 0, 1  # the first `low` are held
    while high <= num_blocks and holds(block_hashes[high - 1]):
        low, high = high, high * 2
    high = min(high, num_blocks + 1)  # the block at `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        if holds(block_hashes[middle - 1]):
            low = middle
        else:
            high = middle
    return low


def _apply_event(blocks: _NamespaceBlocks, event: KvEvent) -> None:
    match event:
        case BlocksStored():
            blocks.setdefault(event.namespace, set()).update(event.block_hashes)
        case BlocksRemoved():
            held = blocks.get(event.namespace)
            if held is not None:
                held.difference_update(event.block_hashes)
                if not held:
                    del blocks[event.namespace]
        case BlocksMoved():
            pass  # held before and after
        case AllBlocksCleared():
            blocks.pop(event.namespace, None)
