from hypothesis import given
from hypothesis import strategies as st

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
from workers.core.prefix_index import Applied, HeldPrefix, PrefixIndex, held_prefix

N1, N2 = NodeId("n1"), NodeId("n2")
SPACE = b"s" * 32
CHAIN = [BlockHash(bytes([i]) * 16) for i in range(20)]


def batch(sequence: int, *events: KvEvent, node: NodeId = N1, incarnation: int = 1) -> EventBatch:
    return EventBatch(node, incarnation, sequence, list(events))


def stored(first: int, last: int) -> BlocksStored:
    return BlocksStored(SPACE, CHAIN[first - 1] if first else b"", list(CHAIN[first:last]))


def removed(first: int, last: int) -> BlocksRemoved:
    return BlocksRemoved(SPACE, list(CHAIN[first:last]), "capacity")


def snapshot(
    sequence: int, *runs: BlocksStored, first: bool = True, last: bool = True, incarnation: int = 1
) -> Snapshot:
    return Snapshot(N1, incarnation, sequence, first, last, list(runs))


class TestHeldPrefix:
    @given(held=st.integers(0, 20), asked=st.integers(0, 20))
    def test_is_what_a_linear_scan_finds(self, held: int, asked: int) -> None:
        assert held_prefix(set(CHAIN[:held]).__contains__, CHAIN[:asked]) == min(held, asked)

    def test_looks_at_few_of_many(self) -> None:
        chain = [i.to_bytes(16) for i in range(500)]
        held = set(chain[:300])
        looks = []

        def holds(key: bytes) -> bool:
            looks.append(key)
            return key in held

        assert held_prefix(holds, chain) == 300
        assert len(looks) <= 20


class TestEvents:
    def test_lengths_by_node_and_namespace(self) -> None:
        index = PrefixIndex()
        assert index.apply(batch(1, stored(0, 5))) is Applied.APPLIED
        assert index.apply(batch(2, stored(0, 8), stored(8, 9), node=N2)) is Applied.APPLIED
        assert index.held_lengths(SPACE, CHAIN) == {N1: 5, N2: 9}
        assert index.held_lengths(SPACE, CHAIN[:3], [N2, NodeId("unknown")]) == {N2: 3}
        assert index.held_lengths(b"other", CHAIN) == {N1: 0, N2: 0}
        assert (index.num_blocks(), index.num_blocks(N1)) == (14, 5)

    def test_removed_and_cleared(self) -> None:
        index = PrefixIndex()
        index.apply(batch(2, stored(0, 5), removed(3, 5)))
        assert index.held_lengths(SPACE, CHAIN) == {N1: 3}
        index.apply(batch(3, AllBlocksCleared(SPACE)))
        assert index.held_lengths(SPACE, CHAIN) == {N1: 0}
        index.apply(batch(4, removed(0, 1)))
        assert index.num_blocks() == 0

    def test_dropped_node_is_gone_and_starts_anew(self) -> None:
        index = PrefixIndex()
        index.apply(batch(1, stored(0, 5)))
        index.drop_node(N1)
        index.drop_node(N1)
        assert index.nodes() == []
        assert index.position(N1) == (0, 0)


class TestSequence:
    def test_gap_asks_for_resync_until_a_snapshot_came(self) -> None:
        index = PrefixIndex()
        index.apply(batch(1, stored(0, 5)))
        assert index.apply(batch(3, stored(5, 6))) is Applied.RESYNC
        assert index.position(N1) == (0, 0)
        assert index.apply(batch(4, stored(6, 7))) is Applied.RESYNC
        assert index.held_lengths(SPACE, CHAIN) == {N1: 5}
        assert index.apply(snapshot(4, stored(0, 7))) is Applied.APPLIED
        assert index.position(N1) == (1, 4)
        assert index.apply(batch(5, stored(7, 8))) is Applied.APPLIED
        assert index.held_lengths(SPACE, CHAIN) == {N1: 8}

    def test_joining_late_is_a_gap(self) -> None:
        assert PrefixIndex().apply(batch(7, stored(0, 1))) is Applied.RESYNC

    def test_repeated_events_count_once(self) -> None:
        index = PrefixIndex()
        index.apply(batch(2, stored(0, 5), removed(3, 5)))
        assert index.apply(batch(1, stored(0, 5))) is Applied.STALE
        assert index.apply(batch(3, stored(0, 5), removed(3, 5), stored(3, 4))) is Applied.APPLIED
        assert index.held_lengths(SPACE, CHAIN) == {N1: 4}

    def test_new_incarnation_voids_the_old(self) -> None:
        index = PrefixIndex()
        index.apply(batch(9, *[stored(i, i + 1) for i in range(9)]))
        assert index.apply(batch(1, stored(0, 1), incarnation=2)) is Applied.APPLIED
        assert index.held_lengths(SPACE, CHAIN) == {N1: 1}
        assert index.apply(batch(10, stored(9, 10), incarnation=1)) is Applied.STALE
        assert index.apply(snapshot(10, stored(0, 10), incarnation=1)) is Applied.STALE
        assert index.held_lengths(SPACE, CHAIN) == {N1: 1}


class TestSnapshot:
    def test_parts_take_effect_together(self) -> None:
        index = PrefixIndex()
        index.apply(batch(1, stored(0, 2)))
        index.apply(snapshot(8, stored(0, 4), last=False))
        assert index.held_lengths(SPACE, CHAIN) == {N1: 2}
        index.apply(snapshot(8, stored(4, 6), first=False))
        assert index.held_lengths(SPACE, CHAIN) == {N1: 6}
        assert index.position(N1) == (1, 8)

    def test_part_without_its_first_asks_for_resync(self) -> None:
        assert PrefixIndex().apply(snapshot(8, stored(4, 6), first=False)) is Applied.RESYNC


class TestDirectoryAndStream:
    def test_an_older_snapshot_does_not_undo_what_the_stream_told(self) -> None:
        """A directory's lists lag behind the node's own events."""
        index = PrefixIndex()
        index.apply(batch(2, stored(0, 5), stored(5, 8)))
        assert index.apply(snapshot(1, stored(0, 5))) is Applied.STALE
        assert index.held_lengths(SPACE, CHAIN) == {N1: 8}
        assert index.position(N1) == (1, 2)

    def test_parts_of_two_snapshots_do_not_mix(self) -> None:
        index = PrefixIndex()
        index.apply(snapshot(5, stored(0, 4), last=False))
        index.apply(snapshot(9, stored(0, 6), last=False))
        assert index.apply(snapshot(5, stored(4, 5), first=False)) is Applied.STALE
        assert index.apply(snapshot(9, stored(6, 7), first=False)) is Applied.APPLIED
        assert index.held_lengths(SPACE, CHAIN) == {N1: 7}


class TestTiers:
    def test_prefix_in_memory_and_on_ssd(self) -> None:
        index = PrefixIndex()
        index.apply(batch(2, stored(0, 9), BlocksMoved(SPACE, list(CHAIN[6:9]), "ssd")))
        assert index.held_prefixes(SPACE, CHAIN) == {N1: HeldPrefix(9, 6)}
        index.apply(batch(3, BlocksMoved(SPACE, list(CHAIN[6:7]), "dram")))
        assert index.held_prefixes(SPACE, CHAIN) == {N1: HeldPrefix(9, 7)}
        assert index.tier_of(N1, SPACE, CHAIN[8]) == "ssd"
        assert index.held_lengths(SPACE, CHAIN) == {N1: 9}

    def test_b44_first_failed_read_behind_the_pools_back_removes_the_claim(self) -> None:
        """Files of the SSD tier were deleted: the read that fails is told as a removal."""
        index = PrefixIndex()
        index.apply(batch(2, stored(0, 9), BlocksMoved(SPACE, list(CHAIN[4:9]), "ssd")))
        lost = BlocksRemoved(SPACE, list(CHAIN[5:9]), "tier_lost")  # with its descendants
        index.apply(batch(3, lost))
        assert index.held_prefixes(SPACE, CHAIN) == {N1: HeldPrefix(5, 4)}
        assert index.num_on_disk(N1) == 1


class TestManyNodes:
    def test_more_nodes_than_bits_in_a_word_and_many_lives(self) -> None:
        index = PrefixIndex()
        names = [NodeId(f"m{i}") for i in range(200)]
        for life in range(1, 4):
            for i, name in enumerate(names):
                index.apply(batch(1, stored(0, i % 21), node=name, incarnation=life))
        lengths = index.held_lengths(SPACE, CHAIN)
        assert lengths == {name: min(i % 21, 20) for i, name in enumerate(names)}

    def test_columns_of_the_gone_are_used_again(self) -> None:
        index = PrefixIndex()
        for life in range(1, 2000):
            index.apply(batch(1, stored(0, 5), incarnation=life))
        (space,) = index._spaces.values()
        assert max(space.masks.values()).bit_length() < 4 * 64


class TestBound:
    def test_b39_keys_are_limited_and_the_oldest_beliefs_go(self) -> None:
        index = PrefixIndex(max_blocks=1000)
        for i in range(5000):
            keys = [(i * 4 + j).to_bytes(16) for j in range(4)]
            node = N1 if i % 2 else N2
            index.apply(batch(i // 2 + 1, BlocksStored(SPACE, b"", keys), node=node))
            assert index.num_distinct <= 1000
        assert index.num_dropped == 20_000 - index.num_distinct
        assert index.num_blocks() == index.num_distinct
        last = [BlockHash((4999 * 4 + j).to_bytes(16)) for j in range(4)]
        first = [BlockHash(j.to_bytes(16)) for j in range(4)]
        assert index.held_lengths(SPACE, last)[N1] == 4
        assert index.held_lengths(SPACE, first) == {N1: 0, N2: 0}

    def test_what_is_told_of_again_is_young(self) -> None:
        index = PrefixIndex(max_blocks=128)
        index.apply(batch(1, stored(0, 4)))
        for i in range(1000):
            keys = [(1000 + i).to_bytes(16)]
            index.apply(batch(i + 2, BlocksStored(SPACE, b"", keys)))
            if i % 10 == 0:
                index.apply(batch(i // 10 + 1, stored(0, 4), node=N2))
        assert index.held_lengths(SPACE, CHAIN) == {N1: 4, N2: 4}


class TestSample:
    def test_claims_are_true_and_differ(self) -> None:
        index = PrefixIndex()
        index.apply(batch(2, stored(0, 9), BlocksMoved(SPACE, list(CHAIN[6:9]), "ssd")))
        index.apply(batch(1, stored(9, 15), node=N2))
        claims = index.sample(N1, 5, iter(range(0, 10_000, 7)))
        assert len(set(claims)) == 5
        for claim in claims:
            assert claim.tier == index.tier_of(claim.node_id, claim.namespace, claim.block_hash)
        assert index.sample(NodeId("unknown"), 5, iter(range(100))) == []

    def test_mistrusted_node_is_asked_for_a_snapshot(self) -> None:
        index = PrefixIndex()
        index.apply(batch(1, stored(0, 9)))
        index.mistrust(N1)
        assert index.position(N1) == (0, 0)
        assert index.held_lengths(SPACE, CHAIN) == {N1: 9}
        assert index.apply(batch(2, stored(9, 10))) is Applied.RESYNC
