"""Which node holds which blocks, as told by the nodes' KV events.

Entries are beliefs tagged (node, incarnation, sequence). What a node holds is prefix-closed, so
the longest held prefixes of a chain are found by bisection for all nodes at once
(`workers.core.block_holders`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from workers.core.block_holders import BlockHolders, Column
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
from workers.core.stats_messages import TierName

MAX_BLOCKS: Final = 8_000_000
"""Bound of an index's blocks: about 1 GB. Beyond it the beliefs that are oldest go."""
SWEPT_A_MESSAGE: Final = 2048
TRIES_A_SAMPLE: Final = 256


class Applied(StrEnum):
    """What became of a message."""

    APPLIED = "applied"
    STALE = "stale"  # of an old incarnation, or known already: ignored
    RESYNC = "resync"  # something was missed: ask the node for a snapshot


class HeldPrefix(NamedTuple):
    """Blocks from the chain's head: held at all, and of these the ones that lie in memory."""

    num_held: int
    num_in_memory: int


class Claim(NamedTuple):
    """The belief that a node holds a block, and where."""

    node_id: NodeId
    namespace: bytes
    block_hash: bytes
    tier: TierName


@dataclass(slots=True)
class _Node:
    node_id: NodeId
    incarnation: int
    sequence: int
    columns: dict[bytes, Column] = field(default_factory=dict)  # by namespace
    staged: dict[bytes, Column] | None = None  # parts of a snapshot that has not ended yet
    staged_sequence: int = 0
    synced: bool = True


class PrefixIndex:
    """Beliefs about many nodes. No method blocks; no result refers to inner state.

    After `RESYNC` the old beliefs stay in use (a wrong one costs a miss, never a wrong answer)
    until a snapshot replaces them; a new incarnation drops them at once. At most `max_blocks` are
    kept; of a chain whose older part went only a miss is left, until its nodes tell of it again.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        self.num_dropped = 0  # blocks forgotten because of the bound
        self._stride = max(1, max_blocks // 64)  # the bound is kept in strides
        self._crowded = max_blocks // 2
        self._stored_since = 0
        self._unswept: set[bytes] = set()  # namespaces
        self._nodes: dict[str, _Node] = {}
        self._zeros: dict[NodeId, int] = {}  # 0 for each node: copied for each answer
        self._base: dict[NodeId, int] = {}  # see `_at_least`
        self._base_key: tuple[int, ...] = ()
        self._spaces: dict[bytes, BlockHolders] = {}
        self._sample_keys: dict[bytes, list[bytes]] = {}

    # --- telling ----------------------------------------------------------------------------

    def apply(self, message: EventBatch | Snapshot) -> Applied:
        """Take in what a node sent, in the order it came."""
        if isinstance(message, EventBatch):
            applied = self._apply_batch(message)
        else:
            applied = self._apply_snapshot(message)
        if self._unswept:
            self._sweep()
        if self._stored_since >= self._stride:
            self._keep_bound()
        return applied

    def drop_node(self, node_id: NodeId) -> None:
        """Forget a node; unknown ones are fine."""
        node = self._nodes.pop(node_id, None)
        if node is not None:
            del self._zeros[node_id]
            self._base_key = ()
            self._close(node.columns)
            self._close(node.staged or {})

    def drop_claims(self, claims: Iterable[Claim]) -> None:
        """Forget single beliefs that were found wrong; what follows them in a chain stays."""
        for claim in claims:
            node = self._nodes.get(claim.node_id)
            column = node.columns.get(claim.namespace) if node is not None else None
            if node is not None and column is not None:
                column.space.remove(column, [claim.block_hash])
                self._close_if_empty(node.columns, claim.namespace)

    def mistrust(self, node_id: NodeId) -> None:
        """Have `position` ask for a snapshot of this node; its beliefs stay in use until then."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.synced = False

    # --- asking -----------------------------------------------------------------------------

    def held_lengths(
        self,
        namespace: bytes,
        block_hashes: Sequence[BlockHash],
        nodes: Collection[NodeId] | None = None,
    ) -> dict[NodeId, int]:
        """For each node (or each known one of `nodes`): blocks it holds from the chain's head.

        In any tier; `held_prefixes` says which part of it lies in memory.
        """
        space = self._spaces.get(namespace)
        groups = space.held(block_hashes) if space is not None else []
        return self._by_node(space, groups, nodes)

    def held_prefixes(
        self,
        namespace: bytes,
        block_hashes: Sequence[BlockHash],
        nodes: Collection[NodeId] | None = None,
    ) -> dict[NodeId, HeldPrefix]:
        """As `held_lengths`, with the part that can be read without waiting for an SSD."""
        held = self.held_lengths(namespace, block_hashes, nodes)
        in_memory = held
        space = self._spaces.get(namespace)
        if space is not None and self._any_on_disk(namespace):
            groups = space.held_in_memory(block_hashes[: max(held.values(), default=0)])
            in_memory = self._by_node(space, groups, nodes)
        return {node: HeldPrefix(held[node], in_memory[node]) for node in held}

    def position(self, node_id: NodeId) -> tuple[Incarnation, int]:
        """(incarnation, sequence) to subscribe from; (0, 0) asks for a snapshot."""
        node = self._nodes.get(node_id)
        if node is None or not node.synced:
            return Incarnation(0), 0
        return Incarnation(node.incarnation), node.sequence

    def tier_of(self, node_id: NodeId, namespace: bytes, block_hash: bytes) -> TierName | None:
        """Where the node is believed to have this block; None: nowhere."""
        node = self._nodes.get(node_id)
        column = node.columns.get(namespace) if node is not None else None
        if column is None:
            return None
        on_disk = column.space.on_disk(column, block_hash)
        return None if on_disk is None else _tier(on_disk)

    def sample(self, node_id: NodeId, count: int, picks: Iterable[int]) -> list[Claim]:
        """At most `count` claims about a node, chosen by random numbers `picks`.

        For a node that holds little of what is known, few or none may be found at a time.
        """
        node = self._nodes.get(node_id)
        weights = [] if node is None else [(c.num_blocks, ns) for ns, c in node.columns.items()]
        total = sum(weight for weight, _ in weights)
        claims: dict[bytes, Claim] = {}
        if node is None or not total:
            return []
        for _, pick in zip(range(count * TRIES_A_SAMPLE), picks, strict=False):
            namespace = _weighted(weights, pick % total)
            key = self._random_key(namespace, pick // total)
            column = node.columns[namespace]
            on_disk = column.space.on_disk(column, key)
            if on_disk is not None:
                claims[key] = Claim(node_id, namespace, key, _tier(on_disk))
            if len(claims) == count:
                break
        return list(claims.values())

    def nodes(self) -> list[NodeId]:
        return list(self._zeros)

    def num_blocks(self, node_id: NodeId | None = None) -> int:
        """Blocks held by one node, or entries over all of them."""
        nodes = self._nodes.values() if node_id is None else [self._nodes[node_id]]
        return sum(column.num_blocks for node in nodes for column in node.columns.values())

    def num_on_disk(self, node_id: NodeId) -> int:
        """Of a node's blocks, those on SSD only."""
        return sum(column.num_on_disk for column in self._nodes[node_id].columns.values())

    @property
    def num_distinct(self) -> int:
        """Blocks that take up memory, however many nodes hold each."""
        return sum(len(space.masks) for space in self._spaces.values())

    # --- inside -----------------------------------------------------------------------------

    def _apply_batch(self, batch: EventBatch) -> Applied:
        node = self._nodes.get(batch.node_id)
        if node is None or node.incarnation != batch.incarnation:
            node = self._current(NodeId(batch.node_id), batch.incarnation)
        if node is None:
            return Applied.STALE
        first = batch.sequence - len(batch.events) + 1
        if not node.synced or first > node.sequence + 1:
            node.synced = False
            return Applied.RESYNC
        if batch.sequence <= node.sequence:
            return Applied.STALE
        events = (
            batch.events if first > node.sequence else batch.events[node.sequence + 1 - first :]
        )
        self._take(node, node.columns, events)
        node.sequence = batch.sequence
        return Applied.APPLIED

    def _apply_snapshot(self, part: Snapshot) -> Applied:
        node = self._current(NodeId(part.node_id), part.incarnation)
        if node is None:
            return Applied.STALE
        if node.synced and part.sequence < node.sequence:
            return Applied.STALE  # from a directory, which lags behind the node's own stream
        if part.first:
            self._close(node.staged or {})
            node.staged, node.staged_sequence = {}, part.sequence
        if node.staged is None:
            node.synced = False
            return Applied.RESYNC
        if part.sequence != node.staged_sequence:
            return Applied.STALE  # of a snapshot that another one has overtaken
        self._take(node, node.staged, part.runs)
        if part.last:
            self._close(node.columns)
            node.columns, node.staged = node.staged, None
            for column in node.columns.values():
                column.space.go_live(column)
            node.sequence, node.synced = part.sequence, True
        return Applied.APPLIED

    def _take(self, node: _Node, columns: dict[bytes, Column], events: Sequence[KvEvent]) -> None:
        for event in events:
            if not isinstance(event, BlocksStored):
                self._apply_other(columns, event)
                continue
            column = columns.get(event.namespace)  # by far the most frequent: no further calls
            if column is None:
                column = self._open(node, columns, event.namespace)
            space, keys = column.space, event.block_hashes
            self._stored_since += len(keys)
            if len(space.masks) > self._crowded:
                space.refresh(keys)  # what is told of again is young
            space.store(column, keys, event.tier == "ssd")

    def _open(self, node: _Node, columns: dict[bytes, Column], namespace: bytes) -> Column:
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = BlockHolders()
            self._base_key = ()
        column = columns[namespace] = space.open(node.node_id)
        if columns is node.columns:
            space.go_live(column)
        return column

    def _apply_other(
        self, columns: dict[bytes, Column], event: BlocksMoved | BlocksRemoved | AllBlocksCleared
    ) -> None:
        column = columns.get(event.namespace)
        if column is None:
            return
        match event:
            case BlocksMoved():
                column.space.move(column, event.block_hashes, event.tier == "ssd")
            case BlocksRemoved():
                column.space.remove(column, event.block_hashes)
                self._close_if_empty(columns, event.namespace)
            case AllBlocksCleared():
                self._close({event.namespace: columns.pop(event.namespace)})

    def _current(self, node_id: NodeId, incarnation: int) -> _Node | None:
        """The node in this incarnation, fresh and empty if it is new; None for an older one."""
        node = self._nodes.get(node_id)
        if node is None or incarnation > node.incarnation:
            self.drop_node(node_id)
            node = self._nodes[node_id] = _Node(node_id, incarnation, sequence=0)
            self._zeros[node_id] = 0
            self._base_key = ()
        return node if node.incarnation == incarnation else None

    def _close_if_empty(self, columns: dict[bytes, Column], namespace: bytes) -> None:
        if not columns[namespace].num_blocks:
            self._close({namespace: columns.pop(namespace)})

    def _close(self, columns: dict[bytes, Column]) -> None:
        for namespace, column in columns.items():
            column.space.close(column)
            self._unswept.add(namespace)

    def _sweep(self) -> None:
        """Take a little of what closed columns left out of the masks; forget empty namespaces."""
        for namespace in list(self._unswept):
            space = self._spaces[namespace]
            space.sweep(SWEPT_A_MESSAGE)
            if space.is_empty:
                del self._spaces[namespace]
                self._sample_keys.pop(namespace, None)
            if space.is_empty or space.is_swept:
                self._unswept.discard(namespace)

    def _keep_bound(self) -> None:
        self._stored_since = 0
        excess = self.num_distinct - (self.max_blocks - self._stride)
        if excess > 0:
            largest = max(self._spaces.values(), key=lambda space: len(space.masks))
            self.num_dropped += largest.drop_oldest(excess)

    def _by_node(
        self,
        space: BlockHolders | None,
        groups: list[tuple[int, int]],
        nodes: Collection[NodeId] | None,
    ) -> dict[NodeId, int]:
        """Each group's length for its nodes, 0 for the others."""
        if nodes is not None:
            lengths = {node: 0 for node in nodes if node in self._nodes}
            for length, held_bits in groups:
                names = space.names(held_bits) if space is not None else ()
                lengths.update((node, length) for node in names if node in lengths)
            return lengths
        if space is None or not groups:
            return self._zeros.copy()
        shortest, held_bits = groups[0]
        for length, bits in groups[1:]:
            held_bits |= bits
            shortest = min(shortest, length)
        lengths = self._at_least(space, shortest, held_bits).copy()
        for length, bits in groups:
            if length != shortest:
                for node in space.names(bits):
                    lengths[node] = length
        return lengths

    def _at_least(self, space: BlockHolders, length: int, held_bits: int) -> dict[NodeId, int]:
        """`length` for the nodes of these bits, 0 for the others. Prompts of one application begin
        with the same blocks: the last answer's one mostly fits."""
        key = (id(space), space.version, length, held_bits)
        if key != self._base_key:
            self._base = self._zeros | dict.fromkeys(space.names(held_bits), length)
            self._base_key = key
        return self._base

    def _any_on_disk(self, namespace: bytes) -> bool:
        columns = (node.columns.get(namespace) for node in self._nodes.values())
        return any(column is not None and column.num_on_disk for column in columns)

    def _random_key(self, namespace: bytes, pick: int) -> bytes:
        """From a list that is read anew when many of it have gone or come."""
        masks = self._spaces[namespace].masks
        keys = self._sample_keys.get(namespace)
        if keys is None or not 0.9 * len(keys) <= len(masks) <= 1.1 * len(keys):
            keys = self._sample_keys[namespace] = list(masks)
        return keys[pick % len(keys)]


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


def _tier(on_disk: bool) -> TierName:
    return "ssd" if on_disk else "dram"


def _weighted(weights: list[tuple[int, bytes]], pick: int) -> bytes:
    for weight, name in weights:
        if pick < weight:
            return name
        pick -= weight
    raise AssertionError("pick is beyond the sum of the weights")
