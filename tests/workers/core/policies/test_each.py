"""What tells one policy from another."""

from __future__ import annotations

from typing import Any

import pytest

from workers.core.policies.class_tables import MAX_LABELS, ClassTables
from workers.core.policies.registry import make_policy


def at(forest: Any, now: float) -> Any:
    forest.now = now
    return forest


class TestLru:
    def test_least_recently_used_first_whatever_was_offered_when(
        self, forest_of: Any, key: Any
    ) -> None:
        forest = forest_of(make_policy("lru"))
        for number in range(4):
            forest.store(key(number))
        at(forest, 1.0).use(key(0))
        forest.pin(key(1))
        forest.unpin(key(1))
        assert forest.evict(4) == [key(1), key(2), key(3), key(0)]

    def test_a_head_stays_while_its_tail_does(self, forest_of: Any, key: Any) -> None:
        forest = forest_of(make_policy("lru"))
        forest.store(key(0))
        other = at(forest, 1.0).chain(10, 2)
        at(forest, 2.0).store(key(1), key(0))
        assert forest.evict(2) == other[::-1]
        assert forest.evict(2) == [key(1), key(0)]


class TestDecay:
    def test_a_reused_block_outlives_a_newer_one_for_a_time(self, forest_of: Any) -> None:
        def oldest(pause: float) -> int:
            forest = forest_of(make_policy("decay"))
            reused = forest.chain(0, 1)
            at(forest, 10.0).use(reused[0])
            at(forest, 10.0 + pause).chain(10, 1)
            return int.from_bytes(forest.evict(1)[0])

        assert oldest(100.0) == 10
        assert oldest(400.0) == 0

    def test_a_long_silence_takes_the_bonus_away(self, forest_of: Any) -> None:
        """A use after hours is as good as a first one."""
        forest = forest_of(make_policy("decay"))
        once = forest.chain(0, 1)
        at(forest, 7200.0).use(once[0])
        at(forest, 7230.0).chain(10, 1)
        assert forest.evict(1) == once

    def test_what_many_share_outlives_what_one_used_twice(self, forest_of: Any) -> None:
        forest = forest_of(make_policy("decay"))
        shared, single = forest.chain(0, 1), forest.chain(10, 1)
        for number in range(64):
            at(forest, 1.0 + number / 100).use(shared[0])
        at(forest, 60.0).use(single[0])
        assert forest.evict(1) == single

    def test_a_return_after_eviction_is_a_reuse(self, forest_of: Any) -> None:
        forest = forest_of(make_policy("decay"))
        back = forest.chain(0, 1)
        assert forest.evict(1) == back
        at(forest, 20.0).chain(0, 1)
        new = at(forest, 60.0).chain(10, 1)
        assert forest.evict(1) == new
        assert forest.policy.use_of(back[0]).uses == 2

    def test_a_moved_block_keeps_its_heat(self, forest_of: Any) -> None:
        forest = forest_of(make_policy("decay"))
        (block,) = forest.chain(0, 1)
        for number in range(1, 4):
            at(forest, 60.0 * number).use(block)
        known = forest.policy.use_of(block)
        assert 1.0 < known.heat < 4.0
        below = forest.policy.sibling()
        below.adopt([known], 200.0)
        assert below.use_of(block) == known


class TestCounting:
    def test_lfu_keeps_the_often_used(self, forest_of: Any) -> None:
        forest = forest_of(make_policy("lfu"))
        often, once = forest.chain(0, 1), forest.chain(10, 1)
        for number in range(5):
            at(forest, float(number)).use(often[0])
        at(forest, 900.0).use(once[0])
        assert forest.evict(1) == once

    def test_lru2_looks_at_the_use_before_the_last(self, forest_of: Any) -> None:
        forest = forest_of(make_policy("lru2"))
        first, second, third = forest.chain(0, 1), forest.chain(10, 1), forest.chain(20, 1)
        for now, block in ((1.0, second), (2.0, first), (3.0, first), (4.0, second)):
            at(forest, now).use(block[0])
        assert forest.evict(3) == [*third, *second, *first]

    def test_score_counts_who_shares(self, forest_of: Any) -> None:
        """100 requests once each outweigh one request 100 times."""
        forest = forest_of(make_policy("score"))
        many, one = forest.chain(0, 1), forest.chain(10, 1)
        for number in range(100):
            at(forest, number / 10).use(many[0], request=f"r{number}")
            for _ in range(2):  # in turns, so that each is a use of its own
                forest.use(one[0], request="same")
                forest.use(one[0], request="other")
        assert forest.policy.use_of(one[0]).uses > forest.policy.use_of(many[0]).uses
        forest.policy.tune({"sharers_weight": 3.0}, 10.0)
        assert forest.evict(1) == one

    def test_credit_grows_with_reuses(self, forest_of: Any) -> None:
        forest = forest_of(make_policy("credit", {"credit_seconds": 100}))
        thrice, twice = forest.chain(0, 1), forest.chain(10, 1)
        for now, block in ((1.0, thrice), (2.0, thrice), (40.0, twice)):
            at(forest, now).use(block[0])
        new = at(forest, 120.0).chain(20, 1)
        assert forest.evict(3) == [*new, *twice, *thrice]


class TestClass:
    def test_learns_which_label_returns(self, forest_of: Any, key: Any) -> None:
        """Blocks of one kind of request come back after 20 s, those of the other never do."""
        forest = forest_of(make_policy("class"))
        policy = forest.policy
        for number in range(2000):
            now = 10.0 * number
            policy.stored(key(2 * number), now, "stays", f"s{number}")
            policy.stored(key(2 * number + 1), now, "leaves", f"l{number}")
            if number > 2:
                policy.accessed([key(2 * number - 4)], now, "stays", f"again{number}")
        for entry in policy.export():
            policy.removed(entry.key)
        at(forest, 30_000.0)
        good, bad = key(100_001), key(100_002)
        for block, label in ((good, "stays"), (bad, "leaves")):
            forest.parent[block] = None
            policy.stored(block, forest.now, label)
            forest.now += 1.0
        forest.refresh()
        assert forest.evict(1) == [bad], "although it is the newer"

    def test_labels_are_bounded(self) -> None:
        tables = ClassTables(300, 3600)
        for number in range(10 * MAX_LABELS):
            tables.class_of(1, False, f"label {number}")
        assert tables.class_of(1, False, "one more") == tables.class_of(1, False, "")
        assert len(tables._ids) <= MAX_LABELS + 1

    def test_values_fall_with_age_before_anything_is_learned(self) -> None:
        tables = ClassTables(300, 3600)
        known = tables.class_of(1, False, "")
        values = [tables.value(known, age) for age in (0.0, 30.0, 300.0, 3000.0)]
        assert values == sorted(values, reverse=True)
        assert values[-1] > 0

    def test_counts_of_a_class_decide_once_there_are_enough(self) -> None:
        tables = ClassTables(1, 3600)
        good, bad = tables.class_of(2, False, ""), tables.class_of(1, False, "")
        for number in range(200):
            now = 100.0 * number
            tables.advance(now)
            segment = tables.used(None, good, now)
            tables.used(None, bad, now)
            tables.came_back(segment, now + 20.0)
        tables.rebuild()
        assert tables.value(good, 10.0) == pytest.approx(0.09, rel=0.5)
        assert tables.value(bad, 10.0) < tables.value(good, 10.0) / 5
        assert tables.value(good, 60.0) < tables.value(good, 10.0) / 5, "it returns young or never"
