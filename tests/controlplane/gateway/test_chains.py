"""Known stretches give the keys that would be computed, within their bound."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from controlplane.gateway import chains
from controlplane.gateway.chains import STRETCH_BLOCKS, KnownChains
from workers.core.hashing import block_hashes, root_hash

SPACE = b"n" * 32
STRETCH = STRETCH_BLOCKS * 4


def tokens(seed: int, count: int) -> array[int]:
    chance = Random(seed)
    return array("i", (chance.randrange(50_000) for _ in range(count)))


@pytest.mark.parametrize("count", [0, 3, STRETCH - 1, STRETCH, STRETCH + 3, 5 * STRETCH + 17])
def test_keys_are_those_of_block_hashes(count: int) -> None:
    known = KnownChains()
    for salt in (None, "a", None):
        root = known.root(SPACE, salt)
        assert root == root_hash(SPACE, salt, None)
        for ids in (tokens(1, count), list(tokens(1, count)), tokens(1, count) + tokens(2, 90)):
            assert known.keys(root, ids, 4) == block_hashes(root, ids, 4)


def test_a_known_beginning_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownChains()
    root = known.root(SPACE, None)
    head = tokens(1, 4 * STRETCH)
    known.keys(root, head, 4)
    hashed: list[int] = []

    def counting(parent: bytes, ids: array[int], block_tokens: int) -> object:
        hashed.append(len(ids))
        return block_hashes(parent, ids, block_tokens)

    monkeypatch.setattr(chains, "block_hashes", counting)
    longer = head + tokens(2, 10)
    assert known.keys(root, longer, 4) == block_hashes(root, longer, 4)
    assert hashed == [10]


def test_bytes_are_bounded_and_the_oldest_go() -> None:
    known = KnownChains(max_bytes=10_000)
    root = known.root(SPACE, None)
    for seed in range(50):
        known.keys(root, tokens(seed, 3 * STRETCH), 4)
        assert known.num_bytes <= 10_000
    assert known.num_bytes > 5_000
    for ids in (tokens(0, 3 * STRETCH), tokens(49, 3 * STRETCH)):
        assert known.keys(root, ids, 4) == block_hashes(root, ids, 4)
