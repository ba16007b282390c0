"""What was evicted, when and why; and whether it was wanted again."""

from __future__ import annotations

from workers.core.eviction_history import Evicted, EvictionHistory
from workers.core.ids import BlockHash
from workers.core.policies.base import Victim


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16))


def victims(*numbers: int, last_use: float = 10.0) -> list[Victim]:
    return [Victim(key(number), 0.0, last_use, 1) for number in numbers]


class TestFinding:
    def test_says_when_why_and_under_what(self) -> None:
        history = EvictionHistory("n1")
        history.under("decay", 7)
        history.note(victims(1, last_use=10.0), 82.0, "capacity")
        history.under("lru", 8)
        history.note(victims(2, last_use=80.0), 90.0, "ssd_capacity", "ssd")
        assert history.find(key(1)) == Evicted(
            key(1), 82.0, 72.0, "n1", "capacity", "dram", "decay", 7, False
        )
        assert history.find(key(2)) == Evicted(
            key(2), 90.0, 10.0, "n1", "ssd_capacity", "ssd", "lru", 8, False
        )
        assert history.find(key(3)) is None

    def test_the_last_eviction_of_a_block_counts(self) -> None:
        history = EvictionHistory()
        history.note(victims(1, 2), 20.0, "capacity")
        history.note(victims(1, last_use=25.0), 30.0, "quota")
        found = history.find(key(1))
        assert found is not None
        assert (found.at, found.trigger, found.age_seconds) == (30.0, "quota", 5.0)
        assert len(history) == 2

    def test_bounded_by_count_oldest_first(self) -> None:
        history = EvictionHistory(max_entries=3)
        history.note(victims(1, 2, 3), 20.0, "capacity")
        history.note(victims(1), 30.0, "capacity")
        history.note(victims(4), 40.0, "capacity")
        assert [history.find(key(n)) is not None for n in (1, 2, 3, 4)] == [True, False, True, True]
        assert history.health({}).evicted_by_reason == {"capacity": 5}


class TestWantedAgain:
    def test_counts_each_eviction_once_and_only_for_a_time(self) -> None:
        history = EvictionHistory(wanted_within_seconds=60.0)
        history.note(victims(1, 2), 100.0, "capacity")
        assert history.wanted([key(1), key(9)], 130.0) == 1
        assert history.wanted([key(1)], 131.0) == 0
        assert history.wanted([key(2)], 161.0) == 0, "too late to be a mistake"
        history.note(victims(1), 140.0, "capacity")
        assert history.wanted([key(1)], 141.0) == 1, "another eviction"
        assert history.wanted_again_total == 2
        found = history.find(key(1))
        assert found is not None
        assert found.wanted_again


class TestHealth:
    def test_nothing_is_unknown_not_zero(self) -> None:
        health = EvictionHistory().health({})
        assert health.age_p50_seconds is None
        assert health.age_p99_seconds is None

    def test_ages_and_counts(self) -> None:
        history = EvictionHistory()
        history.under("credit", 3)
        for number in range(100):
            history.note(victims(number, last_use=float(number)), 100.0, "capacity")
        history.note([], 100.0, "quota")
        health = history.health({"credit_seconds": 5.0}, attempts=9, successes=8, pinned_bytes=7)
        assert (health.policy, health.policy_revision) == ("credit", 3)
        assert (health.attempts_total, health.successes_total, health.pinned_bytes) == (9, 8, 7)
        assert health.age_p50_seconds == 51.0
        assert health.age_p99_seconds == 100.0
        assert health.history_entries == 100
        assert health.evicted_by_reason == {"capacity": 100}

    def test_a_clock_that_stands_still_gives_no_negative_age(self) -> None:
        history = EvictionHistory()
        history.note(victims(1, last_use=5.0), 4.0, "capacity")
        assert history.health({}).age_p50_seconds == 0.0
