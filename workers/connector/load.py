"""Reads blocks from the slab into the engine's paged cache, and proves what it read.

The slot's generation must be what the agent named before the copy and after it, and the payload
must have the checksum that its writer left; each part is summed up just after it is copied, while
the cache still has it. Where the engine calls its layer hooks, layers are copied in groups just
before they are needed; else all at once before the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from workers.connector.layout import PagedKv
from workers.connector.metadata import BlockLoad, LoadOrder, LoadResult

Clock = Callable[[], float]
Cause = Literal["generation", "checksum", "io"]

_LAYER_GROUPS = 4


class SlotMemory(Protocol):
    """The attached slab of one agent incarnation."""

    @property
    def incarnation(self) -> int: ...
    def holds(self, slot: int) -> bool:
        """Is there such a slot?"""

    def payload(self, slot: int) -> torch.Tensor:
        """The block's bytes, 1-D uint8, shared with every process that has the slab."""

    def generation(self, slot: int) -> int:
        """As its header says now."""

    def check(self, slot: int) -> PayloadCheck:
        """To follow the copy that begins now."""


class PayloadCheck(Protocol):
    """Proves one block's copy."""

    def copied(self, start: int, end: int) -> None:
        """These bytes of the payload were copied just now; parts come in order."""

    def verify(self, generation: int, block_hash: bytes) -> Cause | None:
        """None where header and payload are what the block's writer left."""


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that failed verification, and why."""

    block: BlockLoad
    cause: Cause


class Load:
    """One `LoadOrder` under way. Used by the worker's main thread only."""

    def __init__(
        self,
        order: LoadOrder,
        memory: SlotMemory | None,
        paged: PagedKv,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`memory` None, or of another incarnation than the order's, fails every block."""
        self.order = order
        self._memory = memory if memory and memory.incarnation == order.incarnation else None
        self._paged = paged
        self._clock = clock
        self._next_layer = 0
        self._by_layer = [0.0] * paged.num_layers
        self._scatter_seconds = 0.0
        self._verify_seconds = 0.0
        # None where the slot does not hold the block even now.
        self._checks = [self._begin(block) for block in order.blocks]

    def _begin(self, block: BlockLoad) -> PayloadCheck | None:
        memory = self._memory
        if memory is None or not memory.holds(block.slot):
            return None
        same = memory.generation(block.slot) == block.generation
        return memory.check(block.slot) if same else None

    def copy_layers(self, last: int) -> float:
        """Copy every layer before `last` that is not copied yet; returns the seconds it took."""
        first = self._next_layer
        if last <= first:
            return 0.0
        started = self._clock()
        verifying = self._scatter(first, last)
        self._next_layer = last
        took = self._clock() - started
        self._verify_seconds += verifying
        self._scatter_seconds += took - verifying
        for layer in range(first, last):
            self._by_layer[layer] += took / (last - first)
        return took

    def _scatter(self, first: int, last: int) -> float:
        """Seconds of it that checksums took."""
        memory = self._memory
        if memory is None:
            return 0.0
        start, end = self._paged.offsets[first], self._paged.offsets[last]
        there = [
            (block, check)
            for block, check in zip(self.order.blocks, self._checks, strict=True)
            if check is not None
        ]
        seconds = 0.0

        def copied(index: int) -> None:
            nonlocal seconds
            began = self._clock()
            there[index][1].copied(start, end)
            seconds += self._clock() - began

        blocks = [(memory.payload(block.slot), block.pages) for block, _ in there]
        self._paged.scatter_blocks(blocks, first, last, copied)
        return seconds

    def finish(self, *, by_layer: bool) -> tuple[LoadResult, list[BadBlock], set[int]]:
        """Verify. Returns the result, the blocks to report as corrupt, and the engine's blocks
        whose bytes must not be used."""
        complete = self._next_layer == self._paged.num_layers
        began = self._clock()
        bad: list[BadBlock] = []
        failed: list[int] = []
        spoiled: set[int] = set()
        for index, (block, check) in enumerate(zip(self.order.blocks, self._checks, strict=True)):
            cause = None
            if check is not None and complete:
                cause = check.verify(block.generation, block.block_hash)
            if cause is not None:
                bad.append(BadBlock(block, cause))
            if cause is not None or check is None or not complete:
                failed.append(index)
                spoiled.update(target.block_id for target in block.pages)
        result = LoadResult(
            request_id=self.order.request_id,
            attempt=self.order.attempt,
            loaded_blocks=len(self.order.blocks) - len(failed),
            failed_blocks=len(failed),
            first_failed=self.order.first_block + failed[0] if failed else -1,
            loaded_bytes=self._loaded_bytes(set(failed)),
            verify_seconds=self._verify_seconds + self._clock() - began,
            scatter_seconds=self._scatter_seconds,
            by_layer_seconds=self._by_layer if by_layer else [],
        )
        return result, bad, spoiled

    def _loaded_bytes(self, failed: set[int]) -> int:
        page_bytes = sum(self._paged.format.page_bytes)
        return sum(
            page_bytes * len(block.pages)
            for index, block in enumerate(self.order.blocks)
            if index not in failed
        )


def layer_groups(num_layers: int) -> list[int]:
    """For each layer, up to which layer to copy before it runs."""
    size = max(1, -(-num_layers // _LAYER_GROUPS))
    return [min(num_layers, (layer // size + 1) * size) for layer in range(num_layers)]


class LoadBatch:
    """All loads of a step, driven by the engine's hooks."""

    def __init__(self, paged: PagedKv) -> None:
        self._paged = paged
        self._groups = layer_groups(paged.num_layers)
        self._index = {name: index for index, name in enumerate(paged.layer_names)}
        self._loads: Sequence[Load] = ()
        self._next_layer = 0
        self._lazy = False

    @property
    def active(self) -> bool:
        return bool(self._loads)

    def begin(self, loads: Sequence[Load], *, lazy: bool) -> None:
        """Start; with `lazy` the layer hooks copy, else everything is copied now."""
        self._loads = loads
        self._next_layer = 0
        self._lazy = lazy
        if not lazy:
            self._copy(self._paged.num_layers)

    def before_layer(self, name: str) -> None:
        """The engine is about to read this layer."""
        if not self._loads:
            return
        layer = self._index.get(name)
        if layer is not None and layer >= self._next_layer:
            self._copy(self._groups[layer])

    def _copy(self, last: int) -> None:
        for load in self._loads:
            load.copy_layers(last)
        self._next_layer = last

    def finish(self) -> list[tuple[LoadResult, list[BadBlock], set[int]]]:
        """Verify every load and forget them. Layers that no hook asked for count as failed."""
        finished = [load.finish(by_layer=self._lazy) for load in self._loads]
        self._loads = ()
        return finished
