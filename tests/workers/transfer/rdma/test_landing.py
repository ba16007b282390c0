"""A checksum taken while parts land, in whatever order, is that of the whole."""

from __future__ import annotations

import itertools
import random

import pytest

from workers.pool.arena import checksum_of
from workers.transfer.rdma.landing import Landing


@pytest.mark.parametrize("seed", range(5))
def test_any_order_gives_the_checksum_of_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(100_000)
    cuts = [0, *sorted(rng.sample(range(1, len(data)), 7)), len(data)]
    parts = list(itertools.pairwise(cuts))
    rng.shuffle(parts)
    target = bytearray(len(data))
    landing = Landing(memoryview(target))
    for start, end in parts:
        target[start:end] = data[start:end]
        landing.landed(start, end - start)
    assert landing.digest() == checksum_of(data)
    assert landing.seconds > 0


def test_what_has_not_landed_has_no_checksum() -> None:
    landing = Landing(memoryview(bytearray(10)))
    landing.landed(5, 5)
    with pytest.raises(AssertionError):
        landing.digest()
