"""What every eviction policy must do. A new one is added to POLICIES and is covered."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.core.errors import ConfigError
from workers.core.ids import BlockHash
from workers.core.policies.base import EvictionPolicy
from workers.core.policies.lru import LruPolicy
from workers.core.policies.registry import POLICIES, make_policy


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16))


class Forest:
    """Blocks as a pool keeps them: a parent each, pins, and a policy told of it all."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.parent: dict[BlockHash, BlockHash | None] = {}
        self.pinned: set[BlockHash] = set()

    def store(self, block: BlockHash, parent: BlockHash | None = None) -> None:
        self.parent[block] = parent
        self.policy.stored(block, 0.0)
        self.refresh()

    def pin(self, block: BlockHash) -> None:
        self.pinned.add(block)
        self.refresh()

    def unpin(self, block: BlockHash) -> None:
        self.pinned.discard(block)
        self.refresh()

    def children(self, block: BlockHash) -> list[BlockHash]:
        return [child for child, parent in self.parent.items() if parent == block]

    def evictable(self) -> set[BlockHash]:
        return {b for b in self.parent if b not in self.pinned and not self.children(b)}

    def refresh(self) -> None:
        for block in self.parent:
            if block in self.evictable():
                self.policy.offer(block)
            else:
                self.policy.withhold(block)

    def evict(self, num_blocks: int) -> list[BlockHash] | None:
        gone: list[BlockHash] = []

        def uncovers(victim: BlockHash) -> BlockHash | None:
            assert victim not in self.pinned, "a pinned block was chosen"
            assert not [c for c in self.children(victim) if c not in gone], "head before tail"
            gone.append(victim)
            parent = self.parent[victim]
            if parent is None or parent in self.pinned:
                return None
            return None if [c for c in self.children(parent) if c not in gone] else parent

        victims = self.policy.evict(num_blocks, uncovers)
        if victims is not None:
            assert victims == gone
            for victim in victims:
                del self.parent[victim]
        assert self.policy.num_candidates() == len(self.evictable())
        return victims


@pytest.fixture(params=sorted(POLICIES))
def make(request: pytest.FixtureRequest) -> Callable[[], Forest]:
    return lambda: Forest(make_policy(request.param))


def chain(forest: Forest, first: int, length: int) -> list[BlockHash]:
    blocks = [key(first + i) for i in range(length)]
    for i, block in enumerate(blocks):
        forest.store(block, blocks[i - 1] if i else None)
    return blocks


class TestEveryPolicy:
    def test_takes_a_chain_from_its_tail(self, make: Callable[[], Forest]) -> None:
        forest = make()
        blocks = chain(forest, 0, 4)
        assert forest.evict(3) == blocks[:0:-1]
        assert forest.evict(1) == blocks[:1]

    def test_gives_all_or_nothing(self, make: Callable[[], Forest]) -> None:
        forest = make()
        blocks = chain(forest, 0, 4)
        forest.pin(blocks[1])
        assert forest.evict(3) is None
        assert forest.evictable() == {blocks[3]}
        assert forest.evict(2) == [blocks[3], blocks[2]]
        assert forest.evict(1) is None
        forest.unpin(blocks[1])
        assert forest.evict(2) == [blocks[1], blocks[0]]

    def test_failed_attempt_changes_no_later_choice(self, make: Callable[[], Forest]) -> None:
        choices = []
        for attempts in (0, 3):
            forest = make()
            first, second = chain(forest, 0, 3), chain(forest, 10, 3)
            forest.pin(first[0])
            forest.policy.accessed(second[:2], 1.0)
            for _ in range(attempts):
                assert forest.evict(6) is None
            forest.policy.accessed(first[:2], 2.0)
            choices.append(forest.evict(5))
        assert choices[0] == choices[1]

    def test_nothing_from_nothing(self, make: Callable[[], Forest]) -> None:
        forest = make()
        assert forest.evict(0) == []
        assert forest.evict(1) is None

    def test_removed_and_unknown_blocks_are_no_candidates(self, make: Callable[[], Forest]) -> None:
        forest = make()
        (block,) = chain(forest, 0, 1)
        forest.policy.accessed([key(99)], 1.0)
        forest.policy.removed(block)
        forest.policy.removed(block)
        assert forest.policy.num_candidates() == 0
        assert forest.policy.evict(1, lambda _: None) is None

    @given(data=st.data())
    @pytest.mark.parametrize("name", sorted(POLICIES))
    def test_any_forest(self, name: str, data: st.DataObject) -> None:
        forest = Forest(make_policy(name))
        numbers = st.integers(0, 14)
        for step in range(data.draw(st.integers(1, 25))):
            match data.draw(st.sampled_from(["store", "pin", "unpin", "access", "evict"])):
                case "store":
                    parents = [None, *forest.parent]
                    block = key(100 + step)
                    forest.store(block, data.draw(st.sampled_from(parents)))
                case "access":
                    forest.policy.accessed(list(forest.parent)[:3], float(step))
                case "evict":
                    wanted = data.draw(st.integers(0, 5))
                    before = dict(forest.parent)
                    victims = forest.evict(wanted)
                    assert victims is None or len(victims) == wanted
                    assert victims is not None or forest.parent == before
                case "pin" if forest.parent:
                    forest.pin(list(forest.parent)[data.draw(numbers) % len(forest.parent)])
                case "unpin" if forest.pinned:
                    forest.unpin(sorted(forest.pinned)[data.draw(numbers) % len(forest.pinned)])
                case _:
                    pass


class TestLru:
    def test_least_recently_used_first_whatever_was_offered_when(self) -> None:
        forest = Forest(LruPolicy())
        blocks = [key(i) for i in range(4)]
        for block in blocks:
            forest.store(block)
        forest.policy.accessed([blocks[0]], 1.0)
        forest.pin(blocks[1])
        forest.unpin(blocks[1])
        assert forest.evict(4) == [blocks[1], blocks[2], blocks[3], blocks[0]]

    def test_use_of_a_tail_is_use_of_its_head(self) -> None:
        """A head that was stored long ago does not go before another chain used earlier."""
        forest = Forest(LruPolicy())
        head = key(0)
        forest.store(head)
        other = chain(forest, 10, 2)
        forest.store(key(1), head)
        assert forest.evict(2) == other[::-1]
        assert forest.evict(2) == [key(1), head]

    def test_heap_stays_small(self) -> None:
        policy = LruPolicy()
        for i in range(3):
            policy.stored(key(i), 0.0)
        for _ in range(5000):
            for i in range(3):
                policy.offer(key(i))
                policy.withhold(key(i))
        assert len(policy._heap) < 200


def test_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="eviction = 'mru': no such policy"):
        make_policy("mru")
