"""What every eviction policy must do. A new one is added to the registry and is covered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from workers.core.errors import ConfigError
from workers.core.policies.base import BlockUse, Eviction
from workers.core.policies.registry import (
    DEFAULT_POLICY,
    POLICIES,
    POLICY_PARAMS,
    check_policy,
    make_policy,
)

EVERY = sorted(POLICIES)


@pytest.fixture(params=EVERY)
def make(request: pytest.FixtureRequest, forest_of: Any) -> Callable[[], Any]:
    return lambda: forest_of(make_policy(request.param))


class TestEvicting:
    def test_takes_a_chain_from_its_tail(self, make: Any) -> None:
        forest = make()
        blocks = forest.chain(0, 4)
        assert forest.evict(3) == blocks[:0:-1]
        assert forest.evict(1) == blocks[:1]

    def test_gives_all_or_nothing(self, make: Any) -> None:
        forest = make()
        blocks = forest.chain(0, 4)
        forest.pin(blocks[1])
        assert forest.evict(3) is None
        assert forest.evictable() == {blocks[3]}
        assert forest.evict(2) == [blocks[3], blocks[2]]
        assert forest.evict(1) is None
        forest.unpin(blocks[1])
        assert forest.evict(2) == [blocks[1], blocks[0]]

    def test_failed_attempt_changes_no_later_choice(self, make: Any) -> None:
        choices = []
        for attempts in (0, 3):
            forest = make()
            first, second = forest.chain(0, 3), forest.chain(10, 3)
            forest.pin(first[0])
            forest.now = 1.0
            forest.policy.accessed(second[:2], 1.0)
            for _ in range(attempts):
                assert forest.evict(6) is None
            forest.now = 2.0
            forest.policy.accessed(first[:2], 2.0)
            choices.append(forest.evict(5))
        assert choices[0] == choices[1]

    def test_nothing_from_nothing(self, make: Any) -> None:
        forest = make()
        assert forest.evict(0) == []
        assert forest.evict(1) is None
        assert forest.policy.next_worth(1.0) is None

    def test_removed_and_unknown_blocks_are_no_candidates(self, make: Any, key: Any) -> None:
        forest = make()
        (block,) = forest.chain(0, 1)
        forest.policy.accessed([key(99)], 1.0)
        forest.policy.hint([key(99)], "over", 1.0)
        forest.policy.removed(block)
        forest.policy.removed(block)
        forest.policy.offer(block)
        assert forest.policy.num_candidates() == 0
        assert forest.policy.evict(1, lambda _: None) is None
        assert forest.policy.export() == []

    def test_a_block_may_come_back_after_it_went(self, make: Any) -> None:
        forest = make()
        for number in range(4):
            forest.now = 10.0 * number
            (block,) = forest.chain(0, 1)
            assert forest.evict(1) == [block]

    def test_what_was_used_lately_outlives_what_was_not(self, make: Any) -> None:
        forest = make()
        used, idle = forest.chain(0, 3), forest.chain(10, 3)
        for number in range(1, 4):
            forest.now = 5.0 * number
            forest.use(used[-1])
        assert forest.evict(3) == idle[::-1]


class TestTransaction:
    def test_the_next_victim_is_worth_what_was_said(self, make: Any) -> None:
        forest = make()
        for number in range(5):
            forest.now = float(number)
            forest.chain(10 * number, 2)
        forest.now = 9.0
        worth = forest.policy.next_worth(9.0)
        eviction = Eviction(9.0)
        victim = eviction.take([forest.policy])
        assert victim is not None
        assert victim.worth == worth
        eviction.rollback()
        assert forest.policy.next_worth(9.0) == worth
        assert forest.policy.num_candidates() == 5

    def test_several_policies_give_the_least_of_all_or_none(
        self, make: Any, forest_of: Any, key: Any
    ) -> None:
        first = make()
        second = forest_of(first.policy.sibling())
        for number in range(4):
            forest = (first, second)[number % 2]
            forest.now = 10.0 * number
            forest.chain(10 * number, 2)
        policies = [first.policy, second.policy]
        whole = self._all(first, second, policies)
        assert sorted(whole) == sorted([*first.parent, *second.parent])
        assert sorted(whole[:4]) == sorted([key(0), key(1), key(10), key(11)]), "the older first"

    def _all(self, first: Any, second: Any, policies: list[Any]) -> list[Any]:
        """Twice: rolled back, then for good. The same victims."""
        runs = []
        for keep in (False, True):
            eviction = Eviction(40.0)
            while (victim := eviction.take(policies)) is not None:
                forest = first if victim.key in first.parent else second
                parent = forest.parent[victim.key]
                if parent is not None:
                    eviction.uncover(forest.policy, parent)
            if keep:
                eviction.commit()
            else:
                eviction.rollback()
                assert [policy.num_candidates() for policy in policies] == [2, 2]
            runs.append([victim.key for victim in eviction.victims])
        assert runs[0] == runs[1]
        assert [policy.num_candidates() for policy in policies] == [0, 0]
        assert [policy.export() for policy in policies] == [[], []]
        return runs[1]

    def test_nothing_to_take_from_several(self, make: Any) -> None:
        forest = make()
        eviction = Eviction(1.0)
        assert eviction.take([forest.policy, forest.policy.sibling()]) is None
        assert eviction.take([]) is None
        assert eviction.commit() == []


class TestHints:
    def test_a_session_that_is_over_goes_before_others(self, make: Any) -> None:
        forest = make()
        idle = forest.chain(0, 2)
        forest.now = 50.0
        over = forest.chain(10, 2)
        forest.now = 60.0
        forest.policy.hint(over, "over", 60.0)
        assert forest.evict(2) == over[::-1]
        assert forest.evict(2) == idle[::-1], "nothing was dropped by the hint"

    def test_a_session_that_goes_on_stays_longer(self, make: Any) -> None:
        forest = make()
        going = forest.chain(0, 2)
        forest.now = 50.0
        later = forest.chain(10, 2)
        forest.policy.hint(going, "continue", 50.0)
        assert forest.evict(2) == later[::-1]
        assert forest.evict(2) == going[::-1]

    def test_what_others_used_since_is_left_alone(self, make: Any) -> None:
        forest = make()
        mine = forest.chain(0, 3)
        forest.now = 10.0
        other = forest.chain(10, 1)
        forest.now = 20.0
        forest.use(mine[0], request="somebody else")
        forest.policy.hint(mine, "over", 30.0)
        assert forest.evict(2) == [mine[2], mine[1]]
        assert forest.evict(1) == other, "the shared head is no part of the session's end"

    def test_a_use_ends_what_a_hint_said(self, make: Any) -> None:
        forest = make()
        back, idle = forest.chain(0, 1), forest.chain(10, 1)
        forest.policy.hint(back, "over", 5.0)
        forest.now = 10.0
        forest.use(back[0])
        assert forest.evict(1) == idle

    def test_a_hint_may_be_taken_back(self, make: Any) -> None:
        forest = make()
        first, second = forest.chain(0, 1), forest.chain(10, 1)
        forest.policy.hint(first, "over", 1.0)
        forest.policy.hint(first, "continue", 2.0)
        forest.policy.hint(second, "continue", 2.0)
        forest.policy.hint(second, "over", 3.0)
        assert forest.evict(1) == second


class TestUses:
    def test_the_same_request_again_is_the_same_use(self, make: Any) -> None:
        forest = make()
        (block,) = forest.chain(0, 1)
        for name in ("a", "a", "b", "", "", "b"):
            forest.use(block, request=name)
        assert forest.policy.use_of(block).uses == 1 + 5

    def test_storing_counts_as_its_request_s_use(self, make: Any, key: Any) -> None:
        forest = make()
        forest.store(key(1), request="a")
        forest.use(key(1), request="a")
        assert forest.policy.use_of(key(1)).uses == 1


class TestSwitching:
    @pytest.mark.parametrize("target", EVERY)
    def test_blocks_move_to_any_other_policy(self, make: Any, target: str) -> None:
        forest = make()
        idle = forest.chain(0, 3)
        forest.now = 100.0
        busy = forest.chain(10, 3)
        forest.pin(busy[2])
        for number in range(3):
            forest.now += 10.0
            forest.use(busy[-1], request=f"r{number}")
        uses = {use.key: (use.last_use, use.uses) for use in forest.policy.export()}
        switched = make_policy(target)
        switched.adopt(forest.policy.export(), forest.now)
        forest.policy = switched
        assert {use.key: (use.last_use, use.uses) for use in switched.export()} == uses
        assert switched.num_candidates() == 1
        assert forest.evict(3) == idle[::-1]
        assert forest.evict(1) is None
        forest.unpin(busy[2])
        assert forest.evict(3) == busy[::-1]

    def test_one_block_moves_between_tiers_with_its_uses(self, make: Any, key: Any) -> None:
        forest = make()
        (block,) = forest.chain(0, 1)
        for number in range(1, 4):
            forest.now = 10.0 * number
            forest.use(block)
        use = forest.policy.use_of(block)
        below = forest.policy.sibling()
        assert forest.evict(1) == [block]
        below.adopt([use._replace(candidate=False)], forest.now)
        assert below.use_of(block) == use._replace(candidate=False)
        below.adopt([use], forest.now)
        assert below.num_candidates() == 1, "adopted again is adopted once"
        assert below.use_of(key(5)) is None

    def test_adopting_nothing_known_of_heat(self, make: Any, key: Any) -> None:
        policy = make().policy
        policy.adopt([BlockUse(key(1), 1.0, 1, True), BlockUse(key(2), 2.0, 9, True)], 3.0)
        assert policy.evict(1, lambda _: None, 3.0) == [key(1)]


class TestParameters:
    @pytest.mark.parametrize("name", EVERY)
    def test_bounds_are_checked_and_named(self, name: str) -> None:
        for param, bounds in POLICY_PARAMS[name].items():
            assert bounds.low <= bounds.default <= bounds.high
            for value in (bounds.low, bounds.high):
                assert make_policy(name, {param: value}).params[param] == value
            for value in (bounds.low - 1, bounds.high * 2 + 1, float("nan")):
                with pytest.raises(ConfigError, match=f"eviction_params.{param} = ") as refused:
                    make_policy(name, {param: value})
                assert f"{bounds.default:g}" in refused.value.way_out

    @pytest.mark.parametrize("name", EVERY)
    def test_unknown_parameters_are_named_with_those_there_are(self, name: str) -> None:
        with pytest.raises(
            ConfigError, match=f"the policy {name} has no such parameter"
        ) as refused:
            check_policy(name, {"speed": 1.0})
        assert all(param in refused.value.way_out for param in POLICY_PARAMS[name])

    def test_tuning_acts_at_once_and_a_wrong_value_changes_nothing(self, make: Any) -> None:
        forest = make()
        for number in range(6):
            forest.now = 20.0 * number
            chain = forest.chain(10 * number, 2)
            for _ in range(number % 3):
                forest.use(chain[-1])
        before = dict(forest.policy.params)
        with pytest.raises(ConfigError):
            forest.policy.tune({"hint_seconds": -5.0}, forest.now)
        assert forest.policy.params == before
        for name, bounds in forest.policy.declared.items():
            for value in (bounds.low, bounds.high, bounds.default):
                forest.policy.tune({name: value}, forest.now)
                assert forest.policy.params[name] == value
                assert forest.policy.num_candidates() == 6
        assert len(forest.evict(12)) == 12

    def test_the_default_is_one_of_them(self) -> None:
        assert make_policy(DEFAULT_POLICY).params == check_policy(DEFAULT_POLICY, {})

    def test_unknown_policy_is_named(self) -> None:
        with pytest.raises(ConfigError, match="eviction = 'mru': no such policy"):
            make_policy("mru")


class TestMemory:
    def test_what_is_kept_in_order_stays_small(self, make: Any, key: Any) -> None:
        """Pins that come and go, uses and hints leave nothing behind."""
        policy = make().policy
        for i in range(3):
            policy.stored(key(i), 0.0)
        for step in range(3000):
            for i in range(3):
                policy.offer(key(i))
                if step % 7 == 0:
                    policy.accessed([key(i)], float(step))
                if step % 11 == 0:
                    policy.hint([key(i)], "over", float(step))
                policy.withhold(key(i))
        assert _num_held(policy) < 500

    def test_the_memory_of_evicted_blocks_is_bounded(self, make: Any, key: Any) -> None:
        policy = make().policy
        if "history_blocks" not in policy.declared:
            assert not hasattr(policy, "_gone")
            return
        policy.tune({"history_blocks": 10}, 0.0)
        for number in range(100):
            policy.stored(key(number), float(number))
            policy.offer(key(number))
            assert policy.evict(1, lambda _: None, float(number)) == [key(number)]
        assert len(policy._gone) == 10
        policy.tune({"history_blocks": 4}, 100.0)
        assert len(policy._gone) == 4


def _num_held(policy: Any) -> int:
    """Places in heaps and lists."""
    heaps = [getattr(policy, "_heap", [])]
    heaps += getattr(policy, "_lists", [])
    for ends in getattr(policy, "_ends", {}).values():
        heaps += [ends.oldest, ends.newest]
    return sum(map(len, heaps))
