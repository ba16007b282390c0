"""The what-if curve: exact while all keys are sampled, near it with a bounded sample."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

import pytest

from workers.core.hashing import block_hashes
from workers.core.ids import BlockHash
from workers.core.whatif import FACTORS, WhatIf


def stream(num_requests: int, seed: int = 5) -> Iterator[list[BlockHash]]:
    """Sessions that go on, new ones, all behind one shared head."""
    draw = random.Random(seed)
    sessions: list[list[int]] = []
    for number in range(num_requests):
        if sessions and draw.random() < 0.6:
            tokens = sessions[-1 - min(len(sessions) - 1, int(draw.expovariate(0.02)))]
            tokens.extend(range(number * 100, number * 100 + draw.randrange(2, 9)))
        else:
            tokens = [1, 2, 3, *range(number * 100, number * 100 + draw.randrange(5, 30))]
            sessions.append(tokens)
        yield block_hashes(b"root", tokens, 1)


def exact_lru(chains: list[list[BlockHash]], capacity: int) -> float:
    """By hand: blocks in order of use, a chain from tail to head; longest held prefix."""
    held: OrderedDict[BlockHash, None] = OrderedDict()
    hits = 0
    for chain in chains:
        for key in chain:
            if key not in held:
                break
            hits += 1
        for key in reversed(chain):
            held[key] = None
            held.move_to_end(key)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits / sum(map(len, chains))


def fed(chains: list[list[BlockHash]], capacity: int, max_keys: int) -> WhatIf:
    whatif = WhatIf(capacity, max_keys=max_keys, half_life_seconds=1e9)
    for number, chain in enumerate(chains):
        whatif.observe(chain, float(number))
    return whatif


def test_exact_when_every_key_is_sampled() -> None:
    chains = list(stream(400))
    for point in fed(chains, 400, 10**6).curve(400):
        exact = exact_lru(chains, point.capacity_blocks)
        assert point.hit_rate == pytest.approx(exact, abs=0.02), point


def test_near_with_a_small_sample_whose_size_is_bounded() -> None:
    chains = list(stream(4000))
    num_keys = len({key for chain in chains for key in chain})
    whatif = fed(chains, 6000, 2048)
    assert whatif.num_keys <= 2048 < num_keys / 10
    assert whatif.sampled_share < 0.2
    curve = whatif.curve(6000)
    assert [point.capacity_factor for point in curve] == list(FACTORS)
    for point in curve:
        assert point.hit_rate is not None
        assert abs(point.hit_rate - exact_lru(chains, point.capacity_blocks)) < 0.03, point


def test_more_room_never_hits_less() -> None:
    whatif = fed(list(stream(500)), 300, 500)
    rates = [whatif.hit_rate(capacity) for capacity in range(10, 3000, 50)]
    assert rates == sorted(rates, key=lambda rate: rate or 0.0)


def test_says_nothing_before_it_has_seen_enough() -> None:
    whatif = WhatIf(100)
    assert all(point.hit_rate is None for point in whatif.curve(100))
    whatif.observe([], 0.0)
    whatif.observe(next(stream(1)), 1.0)
    assert whatif.hit_rate(100) is None
    assert whatif.curve(0)[0].hit_rate is None


def test_follows_the_traffic() -> None:
    """An hour of nothing but new prompts counts more than the hits of the day before."""
    whatif = WhatIf(1000, half_life_seconds=60.0)
    again = next(stream(1))
    for number in range(200):
        whatif.observe(again, float(number))
    before = whatif.hit_rate(1000)
    for number, chain in enumerate(stream(200, seed=9)):
        whatif.observe(chain[3:], 1000.0 + 10 * number)
    after = whatif.hit_rate(1000)
    assert before is not None
    assert after is not None
    assert before > 0.9
    assert after < before - 0.2


def test_one_chain_larger_than_the_sample() -> None:
    whatif = WhatIf(1000, max_keys=64, half_life_seconds=1e9)
    chain = block_hashes(b"root", list(range(5000)), 1)
    for number in range(3):
        whatif.observe(chain, float(number))
    assert whatif.num_keys <= 64
