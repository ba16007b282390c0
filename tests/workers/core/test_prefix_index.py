from hypothesis import given
from hypothesis import strategies as st

from workers.core.ids import BlockHash, NodeId
from workers.core.messages import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    KvEvent,
    Snapshot,
)
from workers.core.prefix_index import Applied, PrefixIndex, held_prefix

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
