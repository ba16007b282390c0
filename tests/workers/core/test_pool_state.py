from collections.abc import Iterator

import pytest

from workers.core.hashing import block_hashes
from workers.core.ids import BlockHash, OwnerId, load_owner, transfer_owner
from workers.core.messages import BlocksRemoved, BlocksStored, SlotRef, StoredSlot
from workers.core.owners import OwnerTable, TooManyOwnersError
from workers.core.policies.lru import LruPolicy
from workers.core.pool_counters import MAX_PAIRS, OTHER_PAIR, PoolCounters
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import ClientRef, PoolLimits, PoolState
from workers.core.pool_views import num_pending, stored_runs

SPACE = b"s" * 32
P1, P2, D1 = ClientRef(1, "p1"), ClientRef(2, "p2"), ClientRef(3, "d1")
T1, T2 = transfer_owner("1"), transfer_owner("2")
L1 = load_owner("d1", "r1")
A = block_hashes(b"a", range(10), 1)
B = block_hashes(b"b", range(10), 1)


class Bench:
    """A pool of 8 slots with a clock of its own."""

    def __init__(self, num_slots: int = 8, writing: int = 100) -> None:
        self.now = 0.0
        self.pool = PoolState(
            num_slots,
            LruPolicy(),
            PoolLimits(30.0, writing),
            block_bytes=100,
            first_generation=7,
        )

    def prepare(
        self,
        keys: list[BlockHash],
        owner: OwnerId = T1,
        client: ClientRef = P1,
        parent: bytes = b"",
    ) -> list[SlotRef | None]:
        reply = self.pool.prepare_store(client, owner, SPACE, parent, keys, self.now)
        return reply.slots

    def complete(self, slots: list[SlotRef | None]) -> int:
        stored = [StoredSlot(ref.slot, ref.generation, 1) for ref in slots if ref]
        return self.pool.complete_store(self.now, stored)

    def store(
        self, keys: list[BlockHash], owner: OwnerId = T1, client: ClientRef = P1
    ) -> list[SlotRef | None]:
        """Stored and let go."""
        slots = self.prepare(keys, owner, client)
        self.complete(slots)
        self.pool.release(owner, self.now)
        return slots

    def load(self, keys: list[BlockHash], owner: OwnerId = L1) -> list[SlotRef]:
        return self.pool.prepare_load(D1, owner, SPACE, keys, self.now)

    def held(self, keys: list[BlockHash]) -> int:
        return self.pool.lookup(SPACE, keys).num_held


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    check_integrity(made.pool)


class TestStoring:
    def test_blocks_are_readable_once_complete(self, bench: Bench) -> None:
        slots = bench.prepare(A[:3])
        assert [ref is not None for ref in slots] == [True] * 3
        assert bench.pool.lookup(SPACE, A[:4]) == type(bench.pool.lookup(SPACE, []))(0, 3)
        assert bench.complete(slots) == 3
        assert bench.held(A) == 3
        assert bench.pool.take_events() == [BlocksStored(SPACE, b"", list(A[:3]))]

    def test_what_is_held_or_pending_gets_no_second_slot(self, bench: Bench) -> None:
        first = bench.prepare(A[:2])
        assert bench.prepare(A[:3], T2, P2)[:2] == [None, None]
        bench.complete(first)
        assert bench.prepare(A[:3], T2, P2) == [None, None, None]
        assert bench.pool.counters.store_refused_total == 0

    def test_child_waits_for_its_parent(self, bench: Bench) -> None:
        first, second, third = bench.prepare(A[:3])
        bench.complete([third, second])
        assert bench.pool.take_events() == []
        assert bench.held(A) == 0
        assert num_pending(bench.pool) == 3
        bench.complete([first])
        assert bench.held(A) == 3

    def test_failed_write_takes_its_descendants_along(self, bench: Bench) -> None:
        first, second, third = bench.prepare(A[:3])
        bench.complete([first, third])
        assert second is not None
        bench.pool.complete_store(0.0, [], [second])
        assert bench.held(A) == 1
        assert bench.pool.slots.num_free == 7
        assert bench.pool.counters.store_failed_total == 1
        assert bench.prepare(A[1:3], parent=A[0]) != [None, None]

    def test_no_slot_behind_a_hole(self, bench: Bench) -> None:
        assert bench.prepare(A[3:5], parent=A[2]) == [None, None]
        assert bench.pool.counters.store_refused_total == 2
        assert not bench.pool.owners.all()

    def test_late_completion_touches_nobody_elses_slot(self, bench: Bench) -> None:
        (late,) = bench.prepare(A[:1])
        bench.pool.abandon_client(P1.connection)
        others = bench.prepare(B[:8], T2, P2)
        assert late is not None
        assert late.slot in {ref.slot for ref in others if ref}
        assert bench.complete([late]) == 0
        assert bench.held(A) == bench.held(B) == 0

    def test_write_queue_is_bounded_and_says_so(self) -> None:
        bench = Bench(writing=2)
        reply = bench.pool.prepare_store(P1, T1, SPACE, b"", A[:5], 0.0)
        assert (reply.num_refused, reply.write_queue) == (3, (2, 2))
        bench.complete(reply.slots)
        reply = bench.pool.prepare_store(P1, T1, SPACE, A[1], A[2:5], 0.0)
        assert (reply.num_refused, reply.write_queue) == (1, (2, 2))

    def test_generations_start_where_told_and_never_repeat(self, bench: Bench) -> None:
        seen: set[tuple[int, int]] = set()
        for _ in range(5):
            for keys in (A, B):
                slots = [(ref.slot, ref.generation) for ref in bench.store(keys[:8]) if ref]
                assert not seen & set(slots)
                seen |= set(slots)
        assert min(generation for _, generation in seen) == 7

    def test_other_namespace_does_not_find_them(self, bench: Bench) -> None:
        bench.store(A[:2])
        assert bench.pool.lookup(b"other", A).num_held == 0
        assert bench.pool.prepare_load(D1, L1, b"other", A, 0.0) == []
        reply = bench.pool.prepare_store(P1, T1, b"other", b"", A[:1], 0.0)
        assert reply.num_refused == 1


class TestEviction:
    def test_b11_fresh_write_is_not_evicted_first(self, bench: Bench) -> None:
        for i in range(8):
            bench.store(block_hashes(bytes([i]), [0], 1))
        x, y = block_hashes(b"x", [0], 1), block_hashes(b"y", [0], 1)
        bench.store(x)
        bench.store(y)
        assert (bench.held(x), bench.held(y)) == (1, 1)
        assert bench.pool.counters.evicted_blocks_total == 2

    def test_tail_goes_before_head_so_that_a_full_pool_serves(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.pool.take_events()
        bench.store(B[:3])
        assert (bench.held(A), bench.held(B)) == (5, 3)
        removed = [e for e in bench.pool.take_events() if isinstance(e, BlocksRemoved)]
        assert removed == [BlocksRemoved(SPACE, [A[7], A[6], A[5]], "capacity")]

    def test_pins_hold_and_starvation_is_counted(self, bench: Bench) -> None:
        bench.store(A[:5])
        bench.pool.pin_prefix(P1, T1, SPACE, A[:5], 0.0)
        slots = bench.prepare(B[:6], T2)
        assert [ref is not None for ref in slots] == [True] * 3 + [False] * 3
        assert bench.held(A) == 5
        assert bench.pool.counters.starved_by_pins_total == 1
        assert bench.pool.num_pinned == 8

    def test_pin_on_a_tail_keeps_its_ancestors(self, bench: Bench) -> None:
        bench.store(A[:4])
        bench.pool.prepare_load(D1, L1, SPACE, [A[3]], 0.0)
        bench.store(B[:8])
        assert (bench.held(A), bench.held(B)) == (4, 4)

    def test_longer_than_the_pool_keeps_its_head(self, bench: Bench) -> None:
        bench.store(A)
        assert bench.held(A) == 8

    def test_wanted_again_counts_once(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.store(B[:8])
        bench.store(A[:8])
        bench.prepare(A[:8])
        assert bench.pool.counters.evicted_wanted_again_total == 8


class TestReading:
    def test_short_prefix_and_pins(self, bench: Bench) -> None:
        slots = bench.store(A[:3])
        assert bench.load(A) == slots
        assert bench.pool.num_pinned == 3
        assert bench.pool.release(L1, 1.0) == 3
        assert bench.pool.counters.loaded_blocks_total == 3

    def test_pending_blocks_are_not_read(self, bench: Bench) -> None:
        first, _ = bench.prepare(A[:2])
        bench.complete([first])
        assert len(bench.load(A)) == 1
        assert bench.pool.lookup(SPACE, A).num_pending == 1

    def test_b05_lookup_pins_and_touches_nothing(self, bench: Bench) -> None:
        bench.store(A[:4])
        bench.store(B[:4])
        for _ in range(1000):
            bench.held(A)
        assert bench.pool.num_pinned == 0
        bench.store(block_hashes(b"c", range(4), 1))
        assert (bench.held(A), bench.held(B)) == (0, 4)

    def test_loads_count_by_pair_of_workers(self, bench: Bench) -> None:
        bench.store(A[:2], T1, P1)
        slots = bench.prepare(A[:4], T2, P2)
        bench.complete(slots)
        bench.load(A)
        bench.pool.release(L1, 2.0)
        bench.pool.release(L1, 9.0)
        counters = bench.pool.counters
        assert counters.shm_bytes_by_pair == {"p1>d1": 200, "p2>d1": 200}
        assert counters.shm_seconds_by_pair == {"p1>d1": 1.0, "p2>d1": 1.0}

    def test_pairs_are_bounded(self) -> None:
        counters = PoolCounters()
        for i in range(MAX_PAIRS + 10):
            counters.count_pair(f"p{i}", "d", 1, 0.5)
        assert len(counters.shm_bytes_by_pair) == MAX_PAIRS + 1
        assert counters.shm_bytes_by_pair[OTHER_PAIR] == 10
        assert counters.shm_seconds_by_pair[OTHER_PAIR] == 5.0


class TestCorruption:
    def test_block_and_descendants_leave(self, bench: Bench) -> None:
        slots = bench.store(A[:4])
        bench.pool.take_events()
        bad = slots[1]
        assert bad is not None
        assert bench.pool.report_corrupt(SPACE, A[1], bad.slot, bad.generation) == 3
        assert bench.held(A) == 1
        assert bench.pool.slots.num_free == 7
        (event,) = bench.pool.take_events()
        assert isinstance(event, BlocksRemoved)
        assert (event.cause, set(event.block_hashes)) == ("corrupt", set(A[1:4]))

    def test_late_report_hurts_nobody(self, bench: Bench) -> None:
        slots = bench.store(A[:1])
        assert slots[0] is not None
        assert bench.pool.report_corrupt(SPACE, A[0], slots[0].slot, 3) == 0
        assert bench.pool.report_corrupt(SPACE, B[0], slots[0].slot, 3) == 0
        assert bench.held(A) == 1
        assert bench.pool.counters.corrupt_total == 0

    def test_slot_is_not_reused_while_somebody_reads_it(self, bench: Bench) -> None:
        bench.store(A[:2])
        refs = bench.load(A[:2])
        bench.pool.report_corrupt(SPACE, A[0], refs[0].slot, refs[0].generation)
        given = {ref.slot for ref in bench.prepare(B[:8], T2) if ref}
        assert not given & {ref.slot for ref in refs}
        bench.pool.release(L1, 0.0)
        assert bench.pool.slots.num_free == 2
        assert bench.pool.counters.loaded_blocks_total == 1

    def test_pending_child_of_a_corrupt_block_ends_unread(self, bench: Bench) -> None:
        bench.store(A[:1])
        slots = bench.prepare(A[1:3], parent=A[0])
        (ref,) = bench.load(A[:1])
        bench.pool.report_corrupt(SPACE, A[0], ref.slot, ref.generation)
        assert bench.complete(slots) == 2
        assert bench.held(A) == 0
        bench.pool.release(T1, 0.0)
        bench.pool.release(L1, 0.0)
        assert bench.pool.slots.num_free == 8


class TestOwners:
    def test_b06_release_is_idempotent(self, bench: Bench) -> None:
        bench.store(A[:2])
        bench.load(A)
        bench.pool.pin_prefix(P1, T1, SPACE, A, 0.0)
        assert [bench.pool.release(L1, 0.0) for _ in range(3)] == [2, 0, 0]
        assert bench.pool.num_pinned == 2

    def test_lease_ends_pins_and_writes(self, bench: Bench) -> None:
        bench.store(A[:2])
        bench.prepare(A[:4])
        assert bench.pool.expire(29.9) == 0
        assert bench.pool.expire(30.0) == 1
        assert (bench.pool.num_pinned, len(bench.pool.writing)) == (0, 0)
        assert bench.pool.counters.leases_expired_total == 1

    def test_renewed_lease_lasts(self, bench: Bench) -> None:
        bench.store(A[:2])
        bench.load(A)
        assert bench.pool.renew([L1, OwnerId("unknown")], 20.0) == 1
        assert bench.pool.expire(49.0) == 0
        assert bench.pool.expire(50.0) == 1
        assert bench.pool.counters.load_failed_total == 2

    def test_connection_end_fails_its_writes_and_keeps_the_transfer(self, bench: Bench) -> None:
        first, *_ = bench.prepare(A[:3])
        bench.complete([first])
        bench.pool.abandon_client(P1.connection)
        assert bench.held(A) == 1
        assert (bench.pool.num_pinned, bench.pool.slots.num_free) == (1, 7)

    def test_connection_end_ends_loads(self, bench: Bench) -> None:
        bench.store(A[:3])
        bench.load(A)
        bench.pool.abandon_client(D1.connection)
        assert bench.pool.num_pinned == 0
        assert bench.pool.counters.load_failed_total == 3

    def test_owner_that_came_back_on_a_new_connection_is_kept(self, bench: Bench) -> None:
        bench.store(A[:3])
        bench.load(A)
        bench.pool.prepare_load(ClientRef(9, "d1"), L1, SPACE, A, 0.0)
        bench.pool.abandon_client(D1.connection)
        assert bench.pool.num_pinned == 3

    def test_release_during_a_write_lets_it_end_unpinned(self, bench: Bench) -> None:
        slots = bench.prepare(A[:2])
        bench.pool.release(T1, 0.0)
        bench.complete(slots)
        assert (bench.held(A), bench.pool.num_pinned) == (2, 0)
        assert not bench.pool.owners.all()

    def test_owners_are_bounded(self, bench: Bench) -> None:
        bench.store(A[:1])
        bench.pool.owners = OwnerTable(max_owners=1)
        bench.load(A)
        with pytest.raises(TooManyOwnersError, match="transfer:1"):
            bench.pool.pin_prefix(P1, T1, SPACE, A, 0.0)


class TestRuns:
    def test_branches_name_their_parent(self, bench: Bench) -> None:
        branch = block_hashes(A[1], [77, 78], 1)
        bench.store(A[:3])
        bench.complete(bench.prepare(branch, parent=A[1]))
        runs = {run.parent: run.block_hashes for run in stored_runs(bench.pool)}
        assert runs[b""] == A[:2]
        assert len(stored_runs(bench.pool)) == 3
        assert {run.parent for run in stored_runs(bench.pool)} == {b"", A[1]}
