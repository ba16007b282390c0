"""The index against the simplest thing that could be right: a dict of sets a node."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.core.ids import BlockHash, NodeId
from workers.core.messages import (
    AllBlocksCleared,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    KvEvent,
    Snapshot,
)
from workers.core.prefix_index import Applied, HeldPrefix, PrefixIndex

NODES = [NodeId(f"n{i}") for i in range(4)]
SPACES = [b"a" * 32, b"b" * 32]
TRUNK = [BlockHash(bytes([i]) * 16) for i in range(12)]
BRANCHES = [
    TRUNK[:5] + [BlockHash(bytes([100 + 20 * b + i]) * 16) for i in range(8)] for b in range(2)
]
CHAINS = [TRUNK, *BRANCHES]
nodes = st.sampled_from(NODES)
spaces = st.sampled_from(SPACES)
chains = st.sampled_from(CHAINS)
tiers = st.sampled_from(["dram", "ssd"])


class ModelNode:
    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.held: dict[bytes, dict[bytes, str]] = {space: {} for space in SPACES}


class IndexMachine(RuleBasedStateMachine):
    """Each node keeps what it holds prefix-closed, tiers too, as pools do; single claims may be
    dropped, which makes holes."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[NodeId, ModelNode] = {}
        self.holes: set[tuple[NodeId, bytes]] = set()

    def _node(self, name: NodeId) -> ModelNode:
        node = self.model.get(name)
        if node is None:
            node = self.model[name] = ModelNode(1)
            self._snapshot(name, node)
        return node

    def _tell(self, name: NodeId, *events: KvEvent) -> None:
        node = self._node(name)
        node.sequence += len(events)
        batch = EventBatch(name, node.incarnation, node.sequence, list(events))
        assert self.index.apply(batch) is Applied.APPLIED

    @rule(name=nodes, space=spaces, chain=chains, length=st.integers(1, 13), tier=tiers)
    def store(
        self, name: NodeId, space: bytes, chain: list[BlockHash], length: int, tier: str
    ) -> None:
        held = self._node(name).held[space]
        keys = chain[:length]
        on_disk_above = any(held.get(key) == "ssd" for key in keys)
        tier = "ssd" if on_disk_above else tier
        new = [key for key in keys if key not in held]
        if new:
            parent = chain[chain.index(new[0]) - 1] if new[0] != chain[0] else b""
            held.update(dict.fromkeys(new, tier))
            self._tell(name, BlocksStored(space, parent, list(new), tier))  # type: ignore[arg-type]

    @rule(name=nodes, space=spaces, chain=chains)
    def store_again(self, name: NodeId, space: bytes, chain: list[BlockHash]) -> None:
        """Told twice: nothing changes."""
        held = self._node(name).held[space]
        keys = [key for key in chain if held.get(key) == "dram"]
        if keys and (name, space) not in self.holes:
            self._tell(name, BlocksStored(space, b"", list(keys)))

    @rule(name=nodes, space=spaces, chain=chains, length=st.integers(0, 13))
    def remove_tail(self, name: NodeId, space: bytes, chain: list[BlockHash], length: int) -> None:
        held = self._node(name).held[space]
        gone = [
            key
            for each in CHAINS
            for key in each[length:]
            if key in held and self._under(each, chain, length)
        ]
        gone = list(dict.fromkeys(gone))
        if gone:
            for key in gone:
                del held[key]
            self._tell(name, BlocksRemoved(space, gone, "capacity"))

    @staticmethod
    def _under(other: list[BlockHash], chain: list[BlockHash], length: int) -> bool:
        """Whether what follows `length` blocks of `other` descends from the same block."""
        return other[:length] == chain[:length]

    @rule(name=nodes, space=spaces, chain=chains, length=st.integers(0, 13))
    def demote_tail(self, name: NodeId, space: bytes, chain: list[BlockHash], length: int) -> None:
        held = self._node(name).held[space]
        moved = [
            key
            for each in CHAINS
            for key in each[length:]
            if held.get(key) == "dram" and self._under(each, chain, length)
        ]
        moved = list(dict.fromkeys(moved))
        if moved:
            held.update(dict.fromkeys(moved, "ssd"))
            self._tell(name, BlocksMoved(space, moved, "ssd"))

    @rule(name=nodes, space=spaces, chain=chains)
    def promote(self, name: NodeId, space: bytes, chain: list[BlockHash]) -> None:
        held = self._node(name).held[space]
        moved = [key for key in chain if held.get(key) == "ssd"]
        if moved:
            held.update(dict.fromkeys(moved, "dram"))
            self._tell(name, BlocksMoved(space, moved, "dram"))

    @rule(name=nodes, space=spaces)
    def clear(self, name: NodeId, space: bytes) -> None:
        self._node(name).held[space].clear()
        self.holes.discard((name, space))
        self._tell(name, AllBlocksCleared(space))

    @rule(name=nodes)
    def restart(self, name: NodeId) -> None:
        old = self._node(name)
        node = self.model[name] = ModelNode(old.incarnation + 1)
        self.holes -= {(name, space) for space in SPACES}
        self._snapshot(name, node)
        late = EventBatch(name, old.incarnation, old.sequence + 1, [AllBlocksCleared(SPACES[0])])
        assert self.index.apply(late) is Applied.STALE

    @rule(name=nodes, pieces=st.integers(1, 3))
    def gap_and_snapshot(self, name: NodeId, pieces: int) -> None:
        node = self._node(name)
        node.sequence += 2
        lost = EventBatch(name, node.incarnation, node.sequence, [AllBlocksCleared(b"none" * 8)])
        assert self.index.apply(lost) is Applied.RESYNC
        assert self.index.position(name) == (0, 0)
        self._snapshot(name, node, pieces)

    def _snapshot(self, name: NodeId, node: ModelNode, pieces: int = 1) -> None:
        runs = [
            BlocksStored(space, b"", [key], tier)  # type: ignore[arg-type]
            for space, held in node.held.items()
            for key, tier in held.items()
        ]
        cuts = [runs[i::pieces] for i in range(pieces)]
        for i, part in enumerate(cuts):
            first, last = i == 0, i == pieces - 1
            snapshot = Snapshot(name, node.incarnation, node.sequence, first, last, part)
            assert self.index.apply(snapshot) is Applied.APPLIED

    @rule(name=nodes)
    def drop_node(self, name: NodeId) -> None:
        self.index.drop_node(name)
        self.model.pop(name, None)
        self.holes -= {(name, space) for space in SPACES}

    @rule(name=nodes, pick=st.integers(0, 2**40))
    def drop_claim(self, name: NodeId, pick: int) -> None:
        for claim in self.index.sample(name, 1, iter([pick])):
            assert self.model[name].held[claim.namespace].pop(claim.block_hash) == claim.tier
            self.holes.add((name, claim.namespace))
            self.index.drop_claims([claim])

    @invariant()
    def agrees(self) -> None:
        assert set(self.index.nodes()) == set(self.model)
        for space in SPACES:
            for chain in CHAINS:
                lengths = self.index.held_lengths(space, chain)
                some = self.index.held_lengths(space, chain, NODES[:2])
                assert set(some) == set(self.model) & set(NODES[:2])
                for name in some:
                    assert some[name] == lengths[name] or (name, space) in self.holes
                tiers_of = self.index.held_prefixes(space, chain)
                for name, node in self.model.items():
                    self._check(name, space, chain, lengths[name], tiers_of[name], node)

    def _check(
        self, name: NodeId, space: bytes, chain: list[BlockHash], length: int,
        prefix: HeldPrefix, node: ModelNode,
    ) -> None:  # fmt: skip
        held = node.held[space]
        assert prefix.num_in_memory >= 0
        if (name, space) in self.holes:  # some end of a held stretch, and no more
            for found in (length, prefix.num_held):
                assert found == 0 or chain[found - 1] in held
            return
        assert prefix.num_held == length
        linear = next((i for i, key in enumerate(chain) if key not in held), len(chain))
        in_memory = next((i for i, key in enumerate(chain) if held.get(key) != "dram"), len(chain))
        assert (length, prefix.num_in_memory) == (linear, in_memory)

    @invariant()
    def counts(self) -> None:
        for name, node in self.model.items():
            tiers_held = [tier for held in node.held.values() for tier in held.values()]
            assert self.index.num_blocks(name) == len(tiers_held)
            assert self.index.num_on_disk(name) == tiers_held.count("ssd")
            for space in SPACES:
                for key in TRUNK:
                    assert self.index.tier_of(name, space, key) == node.held[space].get(key)

    def teardown(self) -> None:
        """Nothing is left behind: no key, no column."""
        for name in list(self.index.nodes()):
            self.index.drop_node(name)
        for _ in range(4):  # sweeps run beside messages
            self.index.apply(EventBatch("x", 1, 0, []))
        assert self.index.num_distinct == 0
        assert self.index._spaces == {}


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
