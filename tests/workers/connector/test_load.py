from __future__ import annotations

import pytest
import torch

from workers.connector.layout import PagedKv
from workers.connector.load import Load, LoadBatch, layer_groups
from workers.connector.metadata import BlockLoad, LoadOrder, PageTarget

LAYERS = 12


class Memory:
    """Slots in plain memory; what is `broken` fails its verification."""

    incarnation = 5

    def __init__(self, block_bytes):
        self.slots = [torch.full((block_bytes,), slot + 1, dtype=torch.uint8) for slot in range(8)]
        self.generations = [100 + slot for slot in range(8)]
        self.broken = {}

    def holds(self, slot):
        return 0 <= slot < len(self.slots)

    def payload(self, slot):
        return self.slots[slot]

    def generation(self, slot):
        return self.generations[slot]

    def check(self, slot):
        return Check(self, slot)


class Check:
    """Holds the load to its promise: every byte once, in order."""

    def __init__(self, memory, slot):
        self.memory, self.slot, self.done = memory, slot, 0

    def copied(self, start, end):
        assert start == self.done
        self.done = end

    def verify(self, generation, block_hash):
        assert self.done == len(self.memory.slots[self.slot])
        if self.memory.generations[self.slot] != generation:
            return "generation"
        return self.memory.broken.get(self.slot)


@pytest.fixture
def paged():
    base = torch.zeros(LAYERS, 10, 2, 4, 8)
    paged = PagedKv({f"l.{i}": base[i] for i in range(LAYERS)}, pages_per_block=1)
    paged.base = base.view(torch.uint8)
    return paged


@pytest.fixture
def memory(paged):
    return Memory(paged.block_bytes)


def order(*slots, incarnation=5, first_block=2):
    blocks = tuple(
        BlockLoad(bytes([slot % 256]), slot, 100 + slot, (PageTarget(0, index + 1),))
        for index, slot in enumerate(slots)
    )
    return LoadOrder("r", 0, incarnation, first_block, blocks)


def run(paged, memory, loading, *, lazy=False):
    batch = LoadBatch(paged)
    batch.begin([Load(loading, memory, paged)], lazy=lazy)
    for name in paged.layer_names:
        batch.before_layer(name)
    ((result, bad, spoiled),) = batch.finish()
    assert not batch.active
    return result, bad, spoiled


class TestLoad:
    @pytest.mark.parametrize("lazy", [False, True])
    def test_bytes_arrive(self, paged, memory, lazy):
        result, bad, spoiled = run(paged, memory, order(3, 4), lazy=lazy)
        assert (result.loaded_blocks, result.failed_blocks, result.first_failed) == (2, 0, -1)
        assert result.loaded_bytes == 2 * paged.block_bytes
        assert not bad
        assert not spoiled
        assert (paged.base[:, 1] == 4).all()
        assert (paged.base[:, 2] == 5).all()
        assert (paged.base[:, 3] == 0).all()
        assert len(result.by_layer_seconds) == (LAYERS if lazy else 0)

    def test_layers_are_copied_just_before_they_are_needed(self, paged, memory):
        batch = LoadBatch(paged)
        batch.begin([Load(order(3), memory, paged)], lazy=True)
        assert (paged.base[:, 1] == 0).all()
        batch.before_layer("l.0")
        assert (paged.base[:3, 1] == 4).all()
        assert (paged.base[3:, 1] == 0).all()
        for layer in ("l.1", "l.2", "l.3"):
            batch.before_layer(layer)
        assert (paged.base[3:6, 1] == 4).all()

    def test_layers_that_no_hook_asked_for_fail_the_load(self, paged, memory):
        batch = LoadBatch(paged)
        batch.begin([Load(order(3), memory, paged)], lazy=True)
        batch.before_layer("l.0")
        ((result, bad, spoiled),) = batch.finish()
        assert result.failed_blocks == 1
        assert spoiled == {1}
        assert not bad

    @pytest.mark.parametrize("cause", ["checksum", "generation", "io"])
    def test_damaged_block_is_reported_and_its_pages_are_named(self, paged, memory, cause):
        memory.broken[4] = cause
        result, bad, spoiled = run(paged, memory, order(3, 4, 5))
        assert (result.loaded_blocks, result.failed_blocks) == (2, 1)
        assert result.first_failed == 3
        assert [(item.block.slot, item.cause) for item in bad] == [(4, cause)]
        assert spoiled == {2}

    def test_a_slot_of_another_generation_is_not_even_copied(self, paged, memory):
        memory.generations[4] = 999
        result, bad, spoiled = run(paged, memory, order(3, 4))
        assert result.first_failed == 3
        assert not bad  # the reader was late; the block that is there now is somebody else's
        assert spoiled == {2}
        assert (paged.base[:, 2] == 0).all()

    @pytest.mark.parametrize("slot", [-1, 99])
    def test_lost_block(self, paged, memory, slot):
        result, bad, spoiled = run(paged, memory, order(3, slot))
        assert (result.loaded_blocks, result.failed_blocks) == (1, 1)
        assert not bad
        assert spoiled == {2}

    def test_another_incarnations_slots_all_fail(self, paged, memory):
        result, _, spoiled = run(paged, memory, order(3, 4, incarnation=6))
        assert (result.loaded_blocks, result.failed_blocks, result.first_failed) == (0, 2, 2)
        assert spoiled == {1, 2}
        assert (paged.base == 0).all()

    def test_no_slab_at_all(self, paged):
        result, _, spoiled = run(paged, None, order(3))
        assert result.failed_blocks == 1
        assert spoiled == {1}


class TestLayerGroups:
    @pytest.mark.parametrize("num_layers", [1, 2, 5, 6, 7, 12, 30, 32, 80])
    def test_every_layer_is_covered_in_few_groups(self, num_layers):
        ends = layer_groups(num_layers)
        assert all(end > layer for layer, end in enumerate(ends))
        assert ends[-1] == num_layers
        assert len(set(ends)) <= 6
