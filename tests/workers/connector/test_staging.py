"""Many blocks at a time through staging memory: the same bytes at the same places."""

from __future__ import annotations

import random

import pytest
import torch

from workers.connector.layout import PagedKv
from workers.connector.metadata import PageTarget
from workers.connector.staging import Staging

LAYERS, BLOCKS = 5, 16


def one_storage():
    base = torch.randn(LAYERS, BLOCKS, 2, 4, 8)
    return {f"layers.{i}": base[i] for i in range(LAYERS)}


def block_outermost():
    base = torch.randn(BLOCKS, LAYERS, 2, 4, 8)
    return {f"layers.{i}": base[:, i] for i in range(LAYERS)}


def separate():
    return {f"layers.{i}": torch.randn(BLOCKS, 2, 4, 8) for i in range(LAYERS)}


def unlike():
    return {f"layers.{i}": torch.randn(BLOCKS, 1 + i % 2, 4, 8) for i in range(LAYERS)}


def odd_bytes():
    shape = (BLOCKS, 3, 7)
    return {f"layers.{i}": torch.randint(0, 255, shape, dtype=torch.uint8) for i in range(LAYERS)}


@pytest.fixture(params=[one_storage, block_outermost, separate, unlike, odd_bytes])
def caches(request):
    return request.param()


@pytest.fixture(params=[1, 3, 1000], ids=lambda blocks: f"{blocks} at a time")
def staging(request, caches, monkeypatch):
    """Beside a plain `PagedKv` over the same cache; with room for so many blocks."""
    plain = PagedKv(caches, pages_per_block=2, staged=False)
    views = plain._views
    return plain, Staging(views, plain.offsets, 2, request.param * plain.block_bytes)


def payloads(paged: PagedKv, count: int) -> list[torch.Tensor]:
    return [torch.zeros(paged.block_bytes, dtype=torch.uint8) for _ in range(count)]


def test_gathered_blocks_are_what_single_copies_give(staging):
    paged, staged = staging
    ids = random.Random(1).sample(range(BLOCKS), 14)
    pairs = [ids[i : i + 2] for i in range(0, 14, 2)]
    expected, found = payloads(paged, 7), payloads(paged, 7)
    for pair, payload in zip(pairs, expected, strict=True):
        paged.gather(pair, payload)
    staged.gather(list(zip(pairs, found, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("layers", [(0, LAYERS), (1, 3), (4, 5)])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "some pages"])
def test_scattered_blocks_are_what_single_copies_give(staging, caches, layers, whole):
    paged, staged = staging
    rng = random.Random(2)
    ids = rng.sample(range(BLOCKS), 12)
    blocks = []
    for i in range(6):
        pages = [PageTarget(0, ids[2 * i]), PageTarget(1, ids[2 * i + 1])]
        payload = torch.randint(0, 255, (paged.block_bytes,), dtype=torch.uint8)
        blocks.append((payload, pages if whole or i % 2 else pages[1:]))
    before = {name: cache.clone() for name, cache in caches.items()}
    order = []
    staged.scatter(blocks, *layers, order.append)
    found = {name: cache.clone().view(torch.uint8) for name, cache in caches.items()}
    for name, cache in caches.items():
        cache.copy_(before[name])
    for payload, pages in blocks:
        paged.scatter(payload, pages, *layers)
    assert order == list(range(6))
    for name, cache in caches.items():
        assert torch.equal(found[name], cache.contiguous().view(torch.uint8)), name


def test_a_host_cache_is_copied_in_place_and_staging_can_be_asked_for():
    assert PagedKv(separate(), 1)._staging is None
    assert PagedKv(separate(), 1, staged=True)._staging is not None


def test_nothing_to_copy_is_nothing_copied(staging):
    _, staged = staging
    staged.gather([])
    staged.scatter([], 0, LAYERS, pytest.fail)
