"""What a pool counts of its evictions: attempts, successes, and blocks by cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from workers.core.hashing import block_hashes
from workers.core.ids import OwnerId
from workers.core.messages import BlocksRemoved
from workers.core.pool_state import ClientRef

SPACE = b"s" * 32
P1 = ClientRef(1, "p1")
A = block_hashes(b"a", range(20), 1)
B = block_hashes(b"b", range(20), 1)
C = block_hashes(b"c", range(20), 1)
MakeBench = Callable[..., Any]


def counts(bench: Any) -> tuple[int, int]:
    counters = bench.pool.counters
    return counters.evict_attempts_total, counters.evict_successes_total


@pytest.fixture
def small(make_bench: MakeBench) -> Any:
    """Of memory alone."""
    return make_bench(8, 0)


class TestAttempts:
    def test_a_store_with_room_tries_nothing(self, small: Any) -> None:
        small.store(A[:8])
        assert counts(small) == (0, 0)

    def test_a_store_that_needs_room(self, small: Any) -> None:
        small.store(A[:8])
        small.store(B[:3])
        assert counts(small) == (1, 1)

    def test_a_store_that_gets_less_than_it_asked_for(self, small: Any) -> None:
        small.store(A[:8])
        small.pool.pin_prefix(P1, OwnerId("transfer:x"), SPACE, A[:6], small.now)
        assert small.store(B[:3]) == 2
        assert counts(small) == (1, 0)
        assert small.pool.counters.starved_by_pins_total == 1

    def test_a_group_at_its_quota(self, small: Any) -> None:
        small.pool.set_quotas({"a": 4}, {}, 0.0)
        small.store(A[:4], "a")
        small.store(B[:3], "a")
        assert counts(small) == (1, 1)
        small.pool.pin_prefix(P1, OwnerId("transfer:x"), SPACE, B[:3], small.now)
        small.store(C[:3], "a")
        assert counts(small) == (2, 1), "one block may leave, two more were asked for"

    def test_a_store_within_its_quota_of_a_full_pool_is_one_attempt(self, small: Any) -> None:
        small.pool.set_quotas({"b": 8}, {}, 0.0)
        small.store(A[:8])
        small.pool.set_quotas({"default": 4}, {}, 0.0)
        small.store(B[:6], "b")
        assert counts(small) == (1, 1), "groups over their quota are where it looks first"

    def test_trimming_to_a_lowered_quota(self, small: Any) -> None:
        small.store(A[:6], "a")
        small.pool.set_quotas({"a": 2}, {}, 0.0)
        small.pool.trim(small.now)
        assert counts(small) == (1, 1)
        small.pool.trim(small.now)
        assert counts(small) == (1, 1), "nothing is over its limit"

    def test_demoting_ahead_and_room_on_disk(self, bench: Any) -> None:
        bench.store(A[:8])
        bench.demote()
        assert counts(bench) == (1, 1)
        bench.store(B[:4])
        bench.demote()
        assert counts(bench) == (2, 2)
        bench.store(C[:4])
        bench.demote()
        assert counts(bench) == (4, 4), "the disk was full: room there was asked for too"

    def test_where_nothing_may_leave_demotion_does_not_try_again_and_again(
        self, bench: Any
    ) -> None:
        bench.store(A[:8])
        bench.pool.pin_prefix(P1, OwnerId("transfer:x"), SPACE, A[:8], bench.now)
        for _ in range(100):
            assert bench.pool.demote_ahead(bench.now) == 0
        assert counts(bench) == (0, 0)

    def test_trimming_a_lowered_cap(self, bench: Any) -> None:
        bench.store(A[:8])
        bench.demote()
        before = counts(bench)[0]
        bench.pool.disk.cap_blocks = 1
        assert bench.pool.trim(bench.now) == 3
        assert counts(bench) == (before + 1, before + 1)


class TestCauses:
    def test_room_on_disk_has_a_cause_of_its_own(self, bench: Any) -> None:
        for keys in (A, B, C, block_hashes(b"d", range(4), 1)):
            bench.store(keys[:4])
            bench.demote()
        removed = [e for e in bench.pool.take_events() if isinstance(e, BlocksRemoved)]
        assert {event.cause for event in removed} == {"ssd_capacity"}
        assert bench.pool.counters.evicted_by_cause == {"ssd_capacity": 4}
        assert bench.pool.history.by_trigger == {"ssd_capacity": 4}

    def test_counters_and_history_name_the_same_sums(self, make_bench: MakeBench) -> None:
        bench = make_bench(16, 8, reserve_share=0.25)
        for number in range(200):
            keys = block_hashes(number.to_bytes(4, "big"), range(1 + number % 9), 1)
            bench.store(keys, f"tenant{number % 3}")
            if number == 100:
                bench.pool.set_quotas({"tenant1": 5}, {}, bench.now)
            bench.pool.trim(bench.now)
            bench.demote()
        by_cause = dict(bench.pool.counters.evicted_by_cause)
        assert by_cause == dict(bench.pool.history.by_trigger)
        assert set(by_cause) == {"capacity", "quota", "ssd_capacity"}
        stored = bench.pool.counters.stored_blocks_total
        assert sum(by_cause.values()) + len(bench.pool.blocks) == stored
