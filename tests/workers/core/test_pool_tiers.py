"""Out of memory and back into it: demotion and promotion of a pool of two tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from workers.core.blocks import BlockState
from workers.core.hashing import block_hashes
from workers.core.ids import OwnerId
from workers.core.messages import BlocksMoved, BlocksRemoved
from workers.core.pool_integrity import check_integrity
from workers.core.pool_state import ClientRef
from workers.core.pool_views import stored_runs
from workers.core.tiers import Outcome, ReadIn, WriteOut

SPACE = b"s" * 32
P1 = ClientRef(1, "p1")
A = block_hashes(b"a", range(20), 1)
B = block_hashes(b"b", range(20), 1)
C = block_hashes(b"c", range(20), 1)
MakeBench = Callable[..., Any]


class TestDemotion:
    def test_only_a_full_tier_demotes_and_tail_before_head(self, bench: Any) -> None:
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

    def test_a_parent_waits_for_its_child(self, bench: Any) -> None:
        bench.store(A[:8])
        bench.pool.demote_ahead(bench.now)
        writes = [job for job in bench.take() if isinstance(job, WriteOut)]
        for job in reversed(writes):  # heads first
            bench.pool.disk_done(Outcome(job.job), bench.now)
            check_integrity(bench.pool)
        assert bench.tiers(A[:8]) == "ddddssss"

    def test_used_meanwhile_it_stays_and_has_its_copy_for_the_next_time(self, bench: Any) -> None:
        bench.store(A[:8])
        bench.pool.demote_ahead(bench.now)
        bench.pool.pin_prefix(P1, OwnerId("transfer:x"), SPACE, A[:8], bench.now)
        assert bench.work() == 4
        assert bench.tiers(A[:8]) == "d" * 8
        bench.pool.release(OwnerId("transfer:x"), bench.now)
        bench.pool.demote_ahead(bench.now)
        assert bench.tiers(A[:8]) == "ddddssss"
        assert not [job for job in bench.take() if isinstance(job, WriteOut)], "no second write"

    def test_what_cannot_be_demoted_in_time_is_dropped_and_counted(self, bench: Any) -> None:
        bench.store(A[:8])
        bench.store(B[:8])
        assert bench.tiers(B[:8]) == "d" * 8
        assert bench.pool.counters.dropped_undemoted_total == 8
        assert bench.pool.history.by_trigger["capacity"] == 8

    def test_full_disk_lets_the_least_used_tails_go(self, bench: Any) -> None:
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
        self, bench: Any, problem: str
    ) -> None:
        bench.store(A[:8])
        for _ in range(100):
            bench.pool.demote_ahead(bench.now)
            bench.work(problem)
            check_integrity(bench.pool)
        assert bench.tiers(A[:8]) == "d" * 8
        assert bench.pool.disk.slots.num_used == 0
        assert bench.pool.disk.counters.failed_writes_total == 400

    def test_a_source_that_is_not_what_it_was_is_corrupt(self, bench: Any) -> None:
        bench.store(A[:8])
        bench.pool.demote_ahead(bench.now)
        bench.work("source")
        assert bench.tiers(A[:8]) == "dddd----"
        assert bench.pool.counters.corrupt_total == 4

    def test_lowered_cap_is_trimmed_and_keeps_the_rest(self, bench: Any) -> None:
        bench.store(A[:8])
        bench.demote()
        bench.pool.disk.cap_blocks = 1
        assert bench.pool.trim(bench.now) == 3
        assert bench.tiers(A[:8]) == "dddds---"


class TestPromotion:
    def test_it_comes_back_pinned_and_keeps_its_copy(self, bench: Any) -> None:
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

    def test_children_wait_for_their_parents(self, bench: Any) -> None:
        bench.store(A[:8])
        bench.demote()
        bench.promote(A[:8])
        reads = [job for job in bench.take() if isinstance(job, ReadIn)]
        for job in reversed(reads):
            assert bench.tiers(A[:8]) == "ddddssss"
            bench.pool.disk_done(Outcome(job.job), bench.now)
            check_integrity(bench.pool)
        assert bench.tiers(A[:8]) == "d" * 8

    def test_a_block_that_waits_for_its_parents_keeps_its_copy(self, bench: Any) -> None:
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
    def test_a_bad_read_is_a_miss_with_all_that_follows(self, bench: Any, problem: str) -> None:
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

    def test_b22_a_late_bad_read_leaves_the_new_copy_alone(self, bench: Any) -> None:
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

    def test_wanted_blocks_wait_for_slots_and_push_nobody_out(self, make_bench: MakeBench) -> None:
        bench = make_bench(num_disk=16)
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

    def test_first_tokens_go_before_the_rest(self, bench: Any) -> None:
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

    def test_a_store_below_the_disk_brings_its_ancestors_back(self, bench: Any) -> None:
        bench.store(A[:8])
        bench.demote()
        assert bench.store(A[8:10], parent=A[7]) == 0 or bench.tiers(A[:10]) == "ddddssss--"
        assert bench.pool.blocks[A[4]].state is BlockState.PROMOTING
        bench.work()
        assert bench.tiers(A[:8]) == "d" * 8

    def test_b07_index_and_bytes_go_together(self, bench: Any) -> None:
        bench.store(A[:8])
        bench.demote()
        bench.pool.report_corrupt(
            SPACE, A[1], bench.pool.blocks[A[1]].slot, bench.pool.blocks[A[1]].generation
        )
        assert bench.tiers(A[:8]) == "d-------"
        assert bench.pool.disk.slots.num_used == 0
        assert bench.store(A[:8]) == 7
        assert bench.tiers(A[:8]) == "d" * 8
