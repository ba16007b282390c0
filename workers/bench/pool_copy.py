"""Reads from shared memory beside memcpy: the connector's own copies, measured in turns.

Blocks are many enough that no cache holds them. Each round does every way once, so that a noisy
moment of the machine meets all of them; medians are compared. Time is the thread's own: what other
processes took of the core belongs to no copy.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workers.connector.layout import PagedKv
from workers.connector.load import Load, layer_groups
from workers.connector.metadata import BlockLoad, LoadOrder, PageTarget
from workers.connector.slots import SlabSlots
from workers.core.blocks import SLOT_HEADER_BYTES, slot_bytes_of
from workers.core.messages import SlotRef, Welcome
from workers.pool.arena import SlabFile

BLOCK_SIZES = {64 << 10: 4, 1 << 20: 32, 16 << 20: 32}
"""Bytes of a block, and how many layers it is spread over in the engine's cache."""
_SPREAD_BYTES = 128 << 20
_LEASE_SECONDS = 30.0


@dataclass(slots=True)
class _Bench:
    """A slab full of blocks and an engine's cache to read them into."""

    block_bytes: int
    layers: int
    slab: SlabFile
    slots: SlabSlots
    cache: torch.Tensor
    paged: PagedKv
    num_blocks: int

    def targets(self, index: int) -> tuple[PageTarget, ...]:
        return (PageTarget(0, index),)

    def order(self, index: int) -> LoadOrder:
        block = BlockLoad(_key(index), index, 1, self.targets(index))
        return LoadOrder("bench", 0, self.slots.incarnation, 0, (block,))


def measure_copies(rounds: int) -> dict[str, object]:
    """Shares of memcpy by block size, and memcpy's own speed."""
    plain: dict[str, float] = {}
    verified: dict[str, float] = {}
    by_layer: dict[str, float] = {}
    speeds: dict[str, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one copy on one core, as in the connector
    try:
        for block_bytes, layers in BLOCK_SIZES.items():
            medians = _measure(block_bytes, layers, rounds)
            name = str(block_bytes)
            speeds[name] = block_bytes / medians["memcpy"] / 1e9
            plain[name] = medians["memcpy"] / medians["plain"]
            verified[name] = medians["memcpy"] / medians["verified"]
            by_layer[name] = medians["memcpy"] / medians["by_layer"]
    finally:
        torch.set_num_threads(threads)
    return {
        "shm_over_memcpy": plain,
        "shm_verified_over_memcpy": verified,
        "shm_verified_by_layer_over_memcpy": by_layer,
        "memcpy_gb_per_second": speeds,
    }


def _measure(block_bytes: int, layers: int, rounds: int) -> dict[str, float]:
    bench = _prepare(block_bytes, layers)
    try:
        return _medians(bench, _ways(bench), rounds)
    finally:
        bench.slab.close()


def _prepare(block_bytes: int, layers: int) -> _Bench:
    num_blocks = max(8, _SPREAD_BYTES // block_bytes)
    slot_bytes = slot_bytes_of(block_bytes)
    slab = SlabFile(f"perilune-bench-{os.getpid()}.slab", slot_bytes * num_blocks)
    welcome = Welcome(
        "bench", 1, str(slab.path), slot_bytes * num_blocks, slot_bytes, SLOT_HEADER_BYTES,
        num_blocks, _LEASE_SECONDS,
    )  # fmt: skip
    slots = SlabSlots(welcome, block_bytes)
    for index in range(num_blocks):
        slots.begin_write(index).fill_(index % 251)
        slots.seal(SlotRef(index, 1), _key(index))
    cache = torch.zeros(layers, num_blocks, block_bytes // layers, dtype=torch.uint8)
    paged = PagedKv({f"layer.{i}": cache[i] for i in range(layers)}, pages_per_block=1)
    return _Bench(block_bytes, layers, slab, slots, cache, paged, num_blocks)


def _ways(bench: _Bench) -> dict[str, Callable[[int], None]]:
    size, layers, paged, slots = bench.block_bytes, bench.layers, bench.paged, bench.slots
    source = torch.ones(bench.num_blocks * size, dtype=torch.uint8)
    sink = bench.cache.view(-1)
    targets = [bench.targets(index) for index in range(bench.num_blocks)]
    orders = [bench.order(index) for index in range(bench.num_blocks)]
    ends = sorted(set(layer_groups(layers)))

    def memcpy(index: int) -> None:
        start = index * size
        sink[start : start + size].copy_(source[start : start + size])

    def plain(index: int) -> None:
        paged.scatter(slots.payload(index), targets[index], 0, layers)

    def load(index: int, steps: list[int]) -> None:
        loading = Load(orders[index], slots, paged)
        for end in steps:
            loading.copy_layers(end)
        result, _, _ = loading.finish(by_layer=False)
        assert not result.failed_blocks

    return {
        "memcpy": memcpy,
        "plain": plain,
        "verified": lambda index: load(index, [layers]),
        "by_layer": lambda index: load(index, ends),
    }


def _medians(
    bench: _Bench, ways: dict[str, Callable[[int], None]], rounds: int
) -> dict[str, float]:
    """Seconds a block. The ways are a quarter of the blocks apart: none warms another's bytes."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    apart = bench.num_blocks // len(ways)
    for way in ways.values():
        for index in range(bench.num_blocks):
            way(index)
    steps = max(rounds, min(rounds * bench.num_blocks, 20 * rounds))
    for step in range(steps):
        for number, (name, way) in enumerate(ways.items()):
            index = (step + number * apart) % bench.num_blocks
            began = time.thread_time()
            way(index)
            seconds[name].append(time.thread_time() - began)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _key(index: int) -> bytes:
    return index.to_bytes(16, "little")
