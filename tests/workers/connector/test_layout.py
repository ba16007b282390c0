from __future__ import annotations

import pytest
import torch

from workers.connector.layout import PagedKv
from workers.connector.metadata import PageTarget
from workers.core.errors import ConfigError

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 12, 6, 2, 4, 8


def one_storage():
    """Layer outermost in one allocation, as vLLM's CPU build gives it."""
    base = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    return {f"model.layers.{i}.attn": base[i] for i in range(LAYERS)}


def block_outermost():
    base = torch.randn(BLOCKS, LAYERS, HEADS, TOKENS, CONTENT)
    return {f"model.layers.{i}.attn": base[:, i] for i in range(LAYERS)}


def separate():
    return {f"model.layers.{i}.attn": torch.randn(BLOCKS, HEADS, 4, 8) for i in range(LAYERS)}


def unlike():
    return {f"model.layers.{i}.attn": torch.randn(BLOCKS, 1 + i % 2, 4, 8) for i in range(LAYERS)}


@pytest.fixture(params=[one_storage, block_outermost, separate, unlike])
def caches(request):
    return request.param()


class TestPagedKv:
    def test_gather_then_scatter_moves_a_block(self, caches):
        paged = PagedKv(caches, pages_per_block=2)
        payload = torch.zeros(paged.block_bytes, dtype=torch.uint8)
        before = {name: cache.clone() for name, cache in caches.items()}
        paged.gather([1, 4], payload)
        paged.scatter(payload, [PageTarget(0, 2), PageTarget(1, 3)], 0, LAYERS)
        for name, cache in caches.items():
            assert torch.equal(cache[2], before[name][1])
            assert torch.equal(cache[3], before[name][4])
            for block in (0, 1, 4, 5):
                assert torch.equal(cache[block], before[name][block])

    def test_layers_can_go_one_by_one(self, caches):
        paged = PagedKv(caches, pages_per_block=1)
        payload = torch.zeros(paged.block_bytes, dtype=torch.uint8)
        before = {name: cache.clone() for name, cache in caches.items()}
        paged.gather([1], payload)
        paged.scatter(payload, [PageTarget(0, 2)], 3, 5)
        for index, name in enumerate(paged.layer_names):
            source = 1 if index in (3, 4) else 2
            assert torch.equal(caches[name][2], before[name][source])

    def test_only_the_wanted_pages(self, caches):
        paged = PagedKv(caches, pages_per_block=2)
        payload = torch.zeros(paged.block_bytes, dtype=torch.uint8)
        before = {name: cache.clone() for name, cache in caches.items()}
        paged.gather([1, 4], payload)
        paged.scatter(payload, [PageTarget(1, 3)], 0, LAYERS)
        for name, cache in caches.items():
            assert torch.equal(cache[3], before[name][4])
            assert torch.equal(cache[2], before[name][2])

    def test_layers_are_in_their_order(self):
        paged = PagedKv(one_storage(), pages_per_block=1)
        assert paged.layer_names[1:3] == ["model.layers.1.attn", "model.layers.2.attn"]
        assert paged.layer_names[-1] == "model.layers.11.attn"

    def test_format(self):
        paged = PagedKv(one_storage(), pages_per_block=2)
        assert paged.format.dtype == "float32"
        assert paged.format.shape == "2x4x8"
        assert paged.format.page_bytes == (256,) * LAYERS
        assert paged.block_bytes == 256 * LAYERS * 2

    def test_scattered_pages_are_refused(self):
        base = torch.randn(HEADS, BLOCKS, TOKENS, CONTENT)
        with pytest.raises(ConfigError, match="no single run of bytes"):
            PagedKv({"layer.0": base.transpose(0, 1)}, pages_per_block=1)

    def test_no_cache_is_refused(self):
        with pytest.raises(ConfigError, match="no KV cache"):
            PagedKv({}, pages_per_block=1)
