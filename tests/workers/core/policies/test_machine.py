"""Every policy through whatever a pool can do, against a plain model of the forest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from workers.core.ids import BlockHash
from workers.core.policies.base import Eviction
from workers.core.policies.registry import POLICIES, POLICY_PARAMS, make_policy

MACHINE = settings(max_examples=25, stateful_step_count=30, deadline=None)
a_number = st.integers(0, 30)


class PolicyMachine(RuleBasedStateMachine):
    """`name` and `forest_type` are set by the test."""

    name = ""
    forest_type: Any = None

    @initialize()
    def begin(self) -> None:
        self.forest = self.forest_type(make_policy(self.name))

    def block(self, number: int) -> BlockHash:
        blocks: list[BlockHash] = list(self.forest.parent)
        return blocks[number % len(blocks)]

    # --- what happens to blocks -------------------------------------------------------------

    @rule(number=a_number, parent=st.none() | a_number, request=st.sampled_from(["", "a", "b"]))
    def store(self, number: int, parent: int | None, request: str) -> None:
        """Few keys, so that what was evicted comes back."""
        key = BlockHash(number.to_bytes(16))
        if key in self.forest.parent:
            return
        above = self.block(parent) if parent is not None and self.forest.parent else None
        self.forest.store(key, above, request)

    @precondition(lambda self: self.forest.parent)
    @rule(
        number=a_number, request=st.sampled_from(["", "a", "b"]), label=st.sampled_from(["", "x"])
    )
    def use(self, number: int, request: str, label: str) -> None:
        self.forest.use(self.block(number), request, label)

    @precondition(lambda self: self.forest.parent)
    @rule(number=a_number)
    def pin(self, number: int) -> None:
        self.forest.pin(self.block(number))

    @precondition(lambda self: self.forest.pinned)
    @rule(number=a_number)
    def unpin(self, number: int) -> None:
        self.forest.unpin(sorted(self.forest.pinned)[number % len(self.forest.pinned)])

    @precondition(lambda self: self.forest.parent)
    @rule(number=a_number)
    def remove(self, number: int) -> None:
        block = self.block(number)
        self.forest.remove(block)
        assert self.forest.policy.use_of(block) is None

    @precondition(lambda self: self.forest.parent)
    @rule(number=a_number, over=st.booleans())
    def hint(self, number: int, over: bool) -> None:
        path = self.forest.path(self.block(number))
        self.forest.policy.hint(path, "over" if over else "continue", self.forest.now)

    @rule(seconds=st.sampled_from([0.0, 0.5, 7.0, 300.0, 5000.0]))
    def wait(self, seconds: float) -> None:
        self.forest.now += seconds

    # --- evicting ---------------------------------------------------------------------------

    @rule(num_blocks=st.integers(0, 8))
    def evict(self, num_blocks: int) -> None:
        before, known = dict(self.forest.parent), self.forest.policy.export()
        possible = self.forest.num_evictable()
        victims = self.forest.evict(num_blocks)
        if num_blocks > possible:
            assert victims is None
            assert self.forest.parent == before
            assert self.forest.policy.export() == known
        else:
            assert victims is not None
            assert len(victims) == num_blocks
            assert all(self.forest.policy.use_of(victim) is None for victim in victims)

    @rule(num_blocks=st.integers(1, 8))
    def evict_and_take_back(self, num_blocks: int) -> None:
        policy, now = self.forest.policy, self.forest.now
        known, worth = policy.export(), policy.next_worth(now)
        first = self._victims(num_blocks)
        assert policy.export() == known
        assert policy.next_worth(now) == worth
        assert self._victims(num_blocks) == first, "an attempt changed the next one"
        assert (worth is None) == (not first)

    def _victims(self, num_blocks: int) -> list[BlockHash]:
        policy = self.forest.policy
        eviction = Eviction(self.forest.now)
        gone: set[BlockHash] = set()
        for _ in range(num_blocks):
            victim = eviction.take([policy])
            if victim is None:
                break
            gone.add(victim.key)
            parent = self.forest.parent[victim.key]
            siblings = [c for c in self.forest.children(parent) if c not in gone]
            if parent is not None and parent not in self.forest.pinned and not siblings:
                eviction.uncover(policy, parent)
        eviction.rollback()
        return [victim.key for victim in eviction.victims]

    # --- settings ---------------------------------------------------------------------------

    @rule(data=st.data())
    def tune(self, data: st.DataObject) -> None:
        policy = self.forest.policy
        name = data.draw(st.sampled_from(sorted(POLICY_PARAMS[policy.name])))
        bounds = POLICY_PARAMS[policy.name][name]
        value = data.draw(st.sampled_from([bounds.low, bounds.default, bounds.high]))
        policy.tune({name: value}, self.forest.now)

    @rule(name=st.sampled_from(sorted(POLICIES)))
    def switch_there_and_back(self, name: str) -> None:
        """The policy under test takes over from another, which took over from it."""
        for target in (name, self.name):
            switched = make_policy(target)
            switched.adopt(self.forest.policy.export(), self.forest.now)
            self.forest.policy = switched

    # --- always -----------------------------------------------------------------------------

    @invariant()
    def knows_the_blocks_and_the_candidates(self) -> None:
        if not hasattr(self, "forest"):
            return
        uses = self.forest.policy.export()
        assert {use.key for use in uses} == set(self.forest.parent)
        candidates = {use.key for use in uses if use.candidate}
        assert candidates == self.forest.evictable()
        assert self.forest.policy.num_candidates() == len(candidates)
        assert [use.last_use for use in uses] == sorted(use.last_use for use in uses)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_machine(name: str, forest_of: Any) -> None:
    kind = type(
        f"{name.title()}Machine", (PolicyMachine,), {"name": name, "forest_type": forest_of}
    )
    run_state_machine_as_test(kind, settings=MACHINE)
