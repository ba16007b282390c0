"""Two tiers, quotas and active sequences, without a disk: jobs end as the tests say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from workers.core.blocks import BlockState
from workers.core.hashing import block_hashes
from workers.core.ids import BlockHash, OwnerId
from workers.core.messages import BlocksMoved, BlocksRemoved, BlocksStored, StoredSlot
from workers.core.policies.lru import LruPolicy
from workers.core.policies.registry import make_policy
from workers.core.pool_adoption import ADOPTED_OWNER, adopt_in_memory, adopt_on_disk, in_chain_order
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import ClientRef, PoolLimits, PoolState
from workers.core.pool_views import stored_runs
from workers.core.quotas import MAX_GROUPS_A_KIND, OTHERS, Groups
from workers.core.slots import SlotTable
from workers.core.tiers import BlockRecord, DiskJob, Forget, Outcome, ReadIn, WriteOut

SPACE = b"s" * 32
P1 = ClientRef(1, "p1")
A = block_hashes(b"a", range(20), 1)
B = block_hashes(b"b", range(20), 1)
C = block_hashes(b"c", range(20), 1)


class Bench:
    """A pool of 8 slots over a disk of 8; `work` ends all that is under way."""

    def __init__(self, num_slots: int = 8, num_disk: int = 8, **limits: Any) -> None:
        self.now = 0.0
        self.num_owners = 0
        values: dict[str, Any] = {"lease_seconds": 30.0, "reserve_share": 0.5} | limits
        self.pool = PoolState(num_slots, LruPolicy(), PoolLimits(**values), block_bytes=100)
        self.jobs: list[DiskJob] = []
        if num_disk:
            self.pool.disk.open(SlotTable(num_disk, 1))

    def store(
        self, keys: list[BlockHash], tenant: str = "", parent: bytes = b"", space: bytes = SPACE
    ) -> int:
        """Stored and let go; how many were new."""
        self.num_owners += 1
        self.now += 1
        owner = OwnerId(f"transfer:{self.num_owners}")
        reply = self.pool.prepare_store(P1, owner, space, parent, keys, self.now, tenant)
        slots = [StoredSlot(ref.slot, ref.generation, 1) for ref in reply.slots if ref]
        self.pool.complete_store(self.now, slots)
        self.pool.release(owner, self.now)
        return len(slots)

    def demote(self) -> None:
        while self.pool.demote_ahead(self.now):
            self.work()

    def promote(self, keys: list[BlockHash], owner: str = "load:d1:1") -> Any:
        self.now += 1
        return self.pool.promote(P1, OwnerId(owner), SPACE, keys, "first_token", self.now)

    def take(self) -> list[DiskJob]:
        self.jobs += self.pool.disk.take_jobs()
        return self.jobs

    def work(self, problem: Any = "") -> int:
        jobs = [job for job in self.take() if not isinstance(job, Forget)]
        self.jobs.clear()
        for job in jobs:
            self.pool.disk_done(Outcome(job.job, problem), self.now)
        return len(jobs)

    def tiers(self, keys: list[BlockHash]) -> str:
        return self.pool.holds(SPACE, keys)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    check_integrity(made.pool)


class TestDemotion:
    def test_only_a_full_tier_demotes_and_tail_before_head(self, bench: Bench) -> None:
        bench.store(A[:4])
        assert bench.pool.demote_ahead(bench.now) == 0
        bench.store(B[:2])
        bench.pool.take_events()
        assert bench.pool.demote_ahead(bench.now) == 2
        assert bench.tiers(A[:4]) == "dddd", "readable until the copy is there"
        bench.work()
        assert (bench.tiers(A[:4]), bench.tiers(B[:2])) == ("ddss", "dd")
        assert bench.pool.take_events() == [BlocksMoved(SPACE, [A[3], A[2]], "ssd")]
        runs = {run.tier: run.block_hashes for run in stored_runs(bench.pool)}
        assert runs["ssd"] == A[2:4]

    def test_a_parent_waits_for_its_child(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.pool.demote_ahead(bench.now)
        writes = [job for job in bench.take() if isinstance(job, WriteOut)]
        for job in reversed(writes):  # heads first
            bench.pool.disk_done(Outcome(job.job), bench.now)
            check_integrity(bench.pool)
        assert bench.tiers(A[:8]) == "ddddssss"

    def test_used_meanwhile_it_stays_and_has_its_copy_for_the_next_time(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.pool.demote_ahead(bench.now)
        bench.pool.pin_prefix(P1, OwnerId("transfer:x"), SPACE, A[:8], bench.now)
        assert bench.work() == 4
        assert bench.tiers(A[:8]) == "d" * 8
        bench.pool.release(OwnerId("transfer:x"), bench.now)
        bench.pool.demote_ahead(bench.now)
        assert bench.tiers(A[:8]) == "ddddssss"
        assert not [job for job in bench.take() if isinstance(job, WriteOut)], "no second write"

    def test_what_cannot_be_demoted_in_time_is_dropped_and_counted(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.store(B[:8])
        assert bench.tiers(B[:8]) == "d" * 8
        assert bench.pool.counters.dropped_undemoted_total == 8
        assert bench.pool.history.by_trigger["capacity"] == 8

    def test_full_disk_lets_the_least_used_tails_go(self, bench: Bench) -> None:
        for keys in (A, B, C):
            bench.store(keys[:4])
            bench.demote()
        held = [len(bench.tiers(keys[:4]).rstrip("-")) for keys in (A, B, C)]
        assert held == [4, 4, 4]
        bench.store(block_hashes(b"d", range(4), 1))
        bench.demote()
        assert len(bench.tiers(A[:4]).rstrip("-")) == 0
        assert bench.pool.disk.counters.evicted_blocks_total == 4
        found = bench.pool.history.find(A[0])
        assert found is not None
        assert (found.trigger, found.tier) == ("ssd_capacity", "ssd")

    @pytest.mark.parametrize("problem", ["io", "full"])
    def test_b23_a_write_that_fails_leaves_nothing_and_the_block_stays(
        self, bench: Bench, problem: str
    ) -> None:
        bench.store(A[:8])
        for _ in range(100):
            bench.pool.demote_ahead(bench.now)
            bench.work(problem)
            check_integrity(bench.pool)
        assert bench.tiers(A[:8]) == "d" * 8
        assert bench.pool.disk.slots.num_used == 0
        assert bench.pool.disk.counters.failed_writes_total == 400

    def test_a_source_that_is_not_what_it_was_is_corrupt(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.pool.demote_ahead(bench.now)
        bench.work("source")
        assert bench.tiers(A[:8]) == "dddd----"
        assert bench.pool.counters.corrupt_total == 4

    def test_lowered_cap_is_trimmed_and_keeps_the_rest(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.demote()
        bench.pool.disk.cap_blocks = 1
        assert bench.pool.trim(bench.now) == 3
        assert bench.tiers(A[:8]) == "dddds---"


class TestPromotion:
    def test_it_comes_back_pinned_and_keeps_its_copy(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.demote()
        bench.pool.take_events()
        reply = bench.promote(A[:8])
        assert (reply.num_held, reply.num_pending, reply.num_on_disk) == (4, 4, 4)
        assert bench.pool.lookup(SPACE, A[:9]).num_on_disk == 4
        bench.work()
        assert bench.tiers(A[:8]) == "d" * 8
        assert bench.pool.take_events() == [BlocksMoved(SPACE, [*A[4:8]], "dram")]
        assert bench.pool.num_pinned == 8
        assert bench.pool.disk.slots.num_used == 4
        assert bench.pool.counters.promoted_blocks_total == 4

    def test_children_wait_for_their_parents(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.demote()
        bench.promote(A[:8])
        reads = [job for job in bench.take() if isinstance(job, ReadIn)]
        for job in reversed(reads):
            assert bench.tiers(A[:8]) == "ddddssss"
            bench.pool.disk_done(Outcome(job.job), bench.now)
            check_integrity(bench.pool)
        assert bench.tiers(A[:8]) == "d" * 8

    def test_a_block_that_waits_for_its_parents_keeps_its_copy(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.demote()
        bench.promote(A[:8])
        reads = [job for job in bench.take() if isinstance(job, ReadIn)]
        bench.pool.disk_done(Outcome(reads[-1].job), bench.now)  # here, but not readable yet
        while bench.pool.disk.drop_duplicate():
            pass
        check_integrity(bench.pool)
        for job in reads[:-1]:
            bench.pool.disk_done(Outcome(job.job), bench.now)
        assert bench.tiers(A[:8]) == "d" * 8
        while bench.pool.disk.drop_duplicate():
            pass
        check_integrity(bench.pool)

    @pytest.mark.parametrize("problem", ["short", "missing", "checksum", "io"])
    def test_a_bad_read_is_a_miss_with_all_that_follows(self, bench: Bench, problem: str) -> None:
        bench.store(A[:8])
        bench.demote()
        bench.promote(A[:8])
        reads = [job for job in bench.take() if isinstance(job, ReadIn)]
        bench.jobs.clear()
        bench.pool.take_events()
        bench.pool.disk_done(Outcome(reads[1].job, problem), bench.now)  # type: ignore[arg-type]
        for job in (reads[0], *reads[2:]):
            bench.pool.disk_done(Outcome(job.job), bench.now)
        assert bench.tiers(A[:8]) == "ddddd---"
        removed = [e for e in bench.pool.take_events() if isinstance(e, BlocksRemoved)]
        assert [event.cause for event in removed] == ["tier_lost" if problem == "io" else "corrupt"]
        assert set(removed[0].block_hashes) == set(A[5:8])
        assert bench.pool.disk.counters.failed_reads_total == 1

    def test_b22_a_late_bad_read_leaves_the_new_copy_alone(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.demote()
        bench.promote(A[:8])
        reads = [job for job in bench.take() if isinstance(job, ReadIn)]
        bench.jobs.clear()
        bench.pool.disk_done(Outcome(reads[0].job, "checksum"), bench.now)
        bench.pool.release(OwnerId("load:d1:1"), bench.now)
        assert bench.store(A[4:8], parent=A[3]) == 1, "three slots are still being read into"
        for job in reads[1:]:
            bench.pool.disk_done(Outcome(job.job, "checksum"), bench.now)
        assert bench.tiers(A[:8]) == "ddddd---"
        assert bench.store(A[5:8], parent=A[4]) == 3
        assert bench.tiers(A[:8]) == "d" * 8

    def test_wanted_blocks_wait_for_slots_and_push_nobody_out(self) -> None:
        bench = Bench(num_disk=16)
        bench.store(A[:4])
        bench.store(B[:4])
        bench.demote()
        assert bench.tiers(A[:4]) == "ssss"
        bench.store(C[:4])
        reply = bench.promote(A[:4])
        assert (reply.num_held, reply.num_pending, reply.num_on_disk) == (0, 4, 4)
        assert not [job for job in bench.take() if isinstance(job, ReadIn)]
        bench.demote()  # makes room by copying others out
        assert bench.pool.serve_wanted() == 4
        bench.work()
        assert bench.tiers(A[:4]) == "dddd"
        assert bench.pool.counters.evicted_by_cause.total() == 0

    def test_first_tokens_go_before_the_rest(self, bench: Bench) -> None:
        bench.store(A[:4])
        bench.store(B[:4])
        bench.demote()
        bench.store(C[:4])
        pool, now = bench.pool, bench.now
        pool.pin_prefix(P1, OwnerId("load:hold"), SPACE, C[:4], now)
        bench.demote()
        held = OwnerId("load:b")
        pool.promote(P1, held, SPACE, A[:4], "batch", now)
        bench.jobs.clear()
        pool.disk.take_jobs()
        pool.disk.want(pool.blocks[A[2]], "batch")
        pool.disk.want(pool.blocks[B[0]], "first_token")
        pool.disk.want(pool.blocks[B[1]], "batch")
        assert [pool.disk.next_wanted()] == [(pool.blocks[B[0]], "first_token")]
        pool.disk.want(pool.blocks[B[0]], "batch")
        assert [pool.disk.next_wanted()] == [(pool.blocks[B[0]], "first_token")]

    def test_a_store_below_the_disk_brings_its_ancestors_back(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.demote()
        assert bench.store(A[8:10], parent=A[7]) == 0 or bench.tiers(A[:10]) == "ddddssss--"
        assert bench.pool.blocks[A[4]].state is BlockState.PROMOTING
        bench.work()
        assert bench.tiers(A[:8]) == "d" * 8

    def test_b07_index_and_bytes_go_together(self, bench: Bench) -> None:
        bench.store(A[:8])
        bench.demote()
        bench.pool.report_corrupt(
            SPACE, A[1], bench.pool.blocks[A[1]].slot, bench.pool.blocks[A[1]].generation
        )
        assert bench.tiers(A[:8]) == "d-------"
        assert bench.pool.disk.slots.num_used == 0
        assert bench.store(A[:8]) == 7
        assert bench.tiers(A[:8]) == "d" * 8


class TestQuotas:
    def test_a_group_at_its_quota_evicts_its_own(self, bench: Bench) -> None:
        bench.pool.set_quotas({"a": 4}, {}, 0.0)
        bench.store(B[:3], "b")
        bench.store(A[:4], "a")
        bench.store(C[:3], "a")
        assert (bench.tiers(B[:3]), bench.tiers(A[:4]), bench.tiers(C[:3])) == (
            "ddd",
            "d---",
            "ddd",
        )
        tenant = bench.pool.groups.tenant("a")
        assert (tenant.used_blocks, tenant.evicted_blocks_total) == (4, 3)
        assert bench.pool.history.by_trigger["quota"] == 3

    def test_what_does_not_fit_a_quota_is_refused_and_counted(self, bench: Bench) -> None:
        bench.pool.set_quotas({}, {SPACE.hex(): 3}, 0.0)
        assert bench.store(A[:5]) == 3
        assert bench.pool.groups.namespace(SPACE.hex()).refused_blocks_total == 2
        bench.pool.set_quotas({}, {}, 0.0)
        assert bench.store(A[:5]) == 2

    def test_quota_counts_over_both_tiers_and_takes_from_disk_first(self, bench: Bench) -> None:
        bench.pool.set_quotas({"default": 8}, {}, 0.0)
        bench.store(A[:8])
        bench.demote()
        bench.store(B[:2])
        assert bench.tiers(A[:8]) == "ddddss--"
        assert bench.pool.groups.tenant("").used_blocks == 8

    def test_groups_over_a_lowered_quota_go_first_then_one_order(self, bench: Bench) -> None:
        bench.store(B[:4], "b")
        bench.store(A[:4], "a")
        bench.pool.disk.takes_writes = False
        bench.pool.set_quotas({"a": 2}, {}, 0.0)
        bench.store(C[:3], "c")
        assert (bench.tiers(A[:4]), bench.tiers(B[:4])) == ("dd--", "ddd-")

    def test_lowered_quotas_are_taken_in_as_time_goes_by(self, bench: Bench) -> None:
        bench.store(A[:6], "a")
        bench.pool.set_quotas({"a": 2}, {}, 0.0)
        assert bench.pool.trim(bench.now) == 4
        assert bench.tiers(A[:6]) == "dd----"

    def test_groups_are_bounded_and_idle_ones_give_way(self) -> None:
        groups = Groups()
        for i in range(2 * MAX_GROUPS_A_KIND):
            groups.tenant(f"t{i}").used_blocks = 1
        assert len(groups.all()) == MAX_GROUPS_A_KIND
        assert groups.tenant("another").name == OTHERS
        groups.tenant("t3").used_blocks = 0
        assert groups.tenant("another").name == "another"

    @pytest.mark.parametrize("name", ["lru", "decay", "lfu", "score", "credit", "lru2"])
    def test_a_switch_of_policy_loses_no_block_and_no_order(self, bench: Bench, name: str) -> None:
        bench.store(A[:4], "a")
        bench.store(B[:4], "b")
        bench.pool.set_quotas({"a": 8}, {}, bench.now)
        bench.pool.set_policy(make_policy(name), bench.now)
        check_integrity(bench.pool)
        assert bench.pool.policy.policy.name == name
        bench.pool.disk.takes_writes = False
        bench.store(C[:4])
        assert bench.tiers(C[:4]) == "dddd"
        assert bench.pool.counters.evicted_by_cause.total() == 4

    def test_eviction_of_n_is_all_or_nothing(self, bench: Bench) -> None:
        bench.pool.set_quotas({"a": 8}, {}, 0.0)
        bench.store(A[:3], "a")
        bench.store(B[:3], "b")
        bench.pool.pin_prefix(P1, OwnerId("transfer:x"), SPACE, B[:2], bench.now)
        evictor = bench.pool.policy
        assert evictor.evict(5, bench.pool._uncovers(), bench.now) == []
        check_integrity(bench.pool)
        assert bench.tiers(A[:3]) == "ddd"


class TestActiveSequences:
    def test_newest_blocks_of_active_sequences_stay(self) -> None:
        bench = Bench(8, 0, pin_active_share=0.5, pin_active_blocks=2)
        bench.store(A[:4])
        bench.store(B[:8])
        assert bench.tiers(A[:4]) == "dddd"
        assert bench.tiers(B[:8]) == "dddd----"
        bench.pool.expire(bench.now + 31)
        bench.store(C[:6])
        assert bench.tiers(A[:4]).rstrip("-") != "dddd"
        check_integrity(bench.pool)

    def test_share_bounds_them_and_the_session_that_is_over_lets_go(self) -> None:
        bench = Bench(8, 0, pin_active_share=0.5, pin_active_blocks=2)
        bench.store(A[:5])
        assert bench.pool.active.num_kept == 0, "longer than the share"
        bench.store(B[:2])
        bench.store(C[:1])
        assert bench.pool.active.num_kept == 3
        assert bench.pool.hint(SPACE, B[:2], "over", bench.now) == 2
        assert bench.pool.active.num_kept == 1
        assert bench.pool.hint(SPACE, A[:4], "continue", bench.now) == 4
        assert bench.pool.active.num_kept == 4, "the one used longest ago gives way"
        assert [bench.pool.blocks[key].keeps for key in A[:5]] == [0, 0, 1, 1, 0]
        check_integrity(bench.pool)

    def test_a_conversation_is_kept_once_at_its_end(self) -> None:
        bench = Bench(16, 0, pin_active_share=1.0, pin_active_blocks=3)
        for length in (2, 5, 9):
            bench.store(A[:length])
        assert len(bench.pool.active) == 1
        kept = [key for key in A if key in bench.pool.blocks and bench.pool.blocks[key].keeps]
        assert kept == A[6:9]
        check_integrity(bench.pool)


def record(key: bytes, parent: bytes, slot: int, generation: int = 7) -> BlockRecord:
    return BlockRecord(slot, generation, key, parent, SPACE, "t", 100, 1)


class TestAdoption:
    def records(self, num: int, first_slot: int = 0) -> list[BlockRecord]:
        parents: list[bytes] = [b"", *A]
        return [record(A[i], parents[i], first_slot + i) for i in range(num)]

    def test_parents_come_first_and_orphans_are_left(self) -> None:
        records = self.records(5)
        order = in_chain_order([*records[3:], *records[:2]], lambda _: False)
        assert [r.key for r in order] == A[:2]
        twice = [*records[:2], record(A[1], A[0], 9, generation=9)]
        assert [r.slot for r in in_chain_order(twice, lambda _: False)] == [0, 9]

    def test_from_memory_with_slots_that_rest(self) -> None:
        bench = Bench(8, 0)
        pool = PoolState(8, LruPolicy(), PoolLimits(), block_bytes=100, first_generation=100)
        assert adopt_in_memory(pool, self.records(4)[::-1], {6: 3}, 5.0) == 4
        check_integrity(pool)
        assert pool.take_events() == [BlocksStored(SPACE, b"", [*A[:4]])]
        assert pool.slots.num_free == 3
        assert pool.owners.get(ADOPTED_OWNER) is not None
        bench.pool, bench.now = pool, 5.0
        assert bench.store(B[:8]) == 3, "adopted blocks are not evicted for a moment"
        pool.expire(8.0)
        assert pool.num_pinned == 0
        assert 6 in pool.quarantined
        pool.expire(36.0)
        assert not pool.quarantined
        generations = {pool.slots.take() for _ in range(pool.slots.num_free)}
        assert all(pair is not None and pair[1] >= 100 for pair in generations)

    def test_from_disk_below_what_is_here_by_now(self, bench: Bench) -> None:
        pool = bench.pool
        pool.disk.takes_writes = False
        bench.store(A[:2])
        pool.take_events()
        records = [*self.records(5), record(B[3], B[2], 6)]
        assert adopt_on_disk(pool, records, 8, 3.0) == 3
        assert bench.tiers(A[:5]) == "ddsss"
        assert pool.take_events() == [BlocksStored(SPACE, A[1], [*A[2:5]], "ssd")]
        forgotten = {job.disk_slot for job in pool.disk.take_jobs() if isinstance(job, Forget)}
        assert forgotten == {0, 1, 6}
        assert pool.groups.tenant("t").used_blocks == 3


def test_b39_keys_are_bounded_however_many_come() -> None:
    bench = Bench(64, 64, reserve_share=0.1)
    for number in range(3000):
        bench.store(block_hashes(number.to_bytes(4, "big"), range(3), 1), f"tenant{number}")
        bench.pool.demote_ahead(bench.now)
        bench.work()
    pool = bench.pool
    assert len(pool.blocks) <= 128
    assert len(pool.history) <= pool.history.max_entries
    assert len(pool.groups.all()) <= 2 * MAX_GROUPS_A_KIND
    assert len(pool.owners) == 0
    check_integrity(pool)


def test_b09_hit_rate_stays_level_under_one_and_a_half_times_the_pool() -> None:
    bench = Bench(60, 0)
    chains = [block_hashes(f"chain{i}".encode(), range(6), 1) for i in range(15)]
    rates = []
    for _ in range(6):
        hits = asked = 0
        for number in range(150):
            keys = chains[(number * number + 3 * number) % 15]
            hits += bench.pool.lookup(SPACE, keys).num_held
            asked += len(keys)
            bench.store(keys)
            check_integrity(bench.pool)
        rates.append(hits / asked)
    assert min(rates[1:]) > 0.9 * max(rates)
    assert bench.pool.slots.num_used == len(bench.pool.blocks), "allocated = indexed"


def test_b40_an_empty_node_takes_no_more_at_once_than_its_queue() -> None:
    """Nobody is slowed by a restarted node's appetite: it refuses beyond its write queue."""
    bench = Bench(1000, 0, write_queue_blocks=16)
    reply = bench.pool.prepare_store(P1, OwnerId("t"), SPACE, b"", A, 0.0)
    assert (reply.num_refused, reply.write_queue) == (4, (16, 16))
    more = bench.pool.prepare_store(P1, OwnerId("u"), SPACE, b"", B, 0.0)
    assert more.num_refused == len(B)


def test_b43_refused_blocks_are_told_and_can_be_stored_without_a_hole() -> None:
    bench = Bench(8, 0, write_queue_blocks=3)
    assert bench.store(A[:8]) == 3
    assert bench.pool.counters.store_refused_total == 5
    assert bench.store(A[5:8], parent=A[4]) == 0, "nothing behind a hole"
    assert bench.store(A[3:8], parent=A[2]) == 3
    assert bench.store(A[:8]) == 2
    assert bench.tiers(A[:8]) == "d" * 8
