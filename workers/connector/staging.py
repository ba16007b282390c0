"""Copies between the slab and a device's paged cache, many blocks at a time.

A page of a layer is some KiB, and a device takes as long to begin a copy as to move a MiB. So a
batch of blocks is put together on the device (one kernel a layer), crosses in one copy to or from
pinned memory, and only there is taken apart, at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from workers.connector.metadata import PageTarget

T = TypeVar("T")
STAGING_BYTES = 64 << 20
"""Of pinned memory, and as much on the device."""

Outgoing = tuple[Sequence[int], torch.Tensor]
"""A pool block's pages on the device, and its payload in the slab."""
Incoming = tuple[torch.Tensor, Sequence[PageTarget]]


class Staging:
    """Of one worker; used by its main thread only. Payloads are layer-major: layer `i` of a block
    lies from `offsets[i]` to `offsets[i + 1]`, its pages in order."""

    def __init__(
        self,
        views: Sequence[torch.Tensor],
        offsets: Sequence[int],
        pages_per_block: int,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """`views`: per layer [blocks, bytes of a page], uint8, all on one device."""
        self._views = [_words(view) for view in views]
        self._offsets = offsets
        self._per_block = pages_per_block
        self._device = views[0].device
        size = max(staging_bytes, offsets[-1])
        self._near = torch.empty(size, dtype=torch.uint8, device=self._device)
        pinned = self._device.type == "cuda"
        self._far = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def gather(self, blocks: Sequence[Outgoing]) -> None:
        """From the device into payloads. Returns when they are whole."""
        block_bytes = self._offsets[-1]
        for group in _groups(blocks, len(self._far) // block_bytes):
            near = self._part(self._near, len(group), block_bytes)
            ids = self._indices(block_id for block_ids, _ in group for block_id in block_ids)
            for layer, view in enumerate(self._views):
                sink = near[:, self._offsets[layer] : self._offsets[layer + 1]]
                pages = view.index_select(0, ids).view(torch.uint8)
                sink.copy_(pages.view(len(group), -1))
            far = self._part(self._far, len(group), block_bytes)
            far.copy_(near, non_blocking=True)
            self._wait()
            for (_, payload), row in zip(group, far, strict=True):
                payload.copy_(row)

    def scatter(
        self, blocks: Sequence[Incoming], first: int, last: int, copied: Callable[[int], None]
    ) -> None:
        """Layers `first` up to `last` from payloads onto the device. `copied` is told the index of
        each block whose bytes were just read."""
        start, end = self._offsets[first], self._offsets[last]
        done = 0
        for group in _groups(blocks, len(self._far) // (end - start)):
            far = self._part(self._far, len(group), end - start)
            for row, (payload, _) in zip(far, group, strict=True):
                row.copy_(payload[start:end])
                copied(done)
                done += 1
            near = self._part(self._near, len(group), end - start)
            near.copy_(far, non_blocking=True)
            self._spread(near, [pages for _, pages in group], first, last)
            self._wait()  # the pinned memory is written again

    def _spread(
        self, near: torch.Tensor, targets: Sequence[Sequence[PageTarget]], first: int, last: int
    ) -> None:
        ids = self._indices(page.block_id for pages in targets for page in pages)
        rows = [
            index * self._per_block + page.page
            for index, pages in enumerate(targets)
            for page in pages
        ]
        whole = len(rows) == len(targets) * self._per_block and rows == list(range(len(rows)))
        chosen = None if whole else self._indices(rows)
        base = self._offsets[first]
        for layer in range(first, last):
            part = near[:, self._offsets[layer] - base : self._offsets[layer + 1] - base]
            view = self._views[layer]
            pages = part.reshape(len(targets) * self._per_block, -1).view(view.dtype)
            view.index_copy_(0, ids, pages if chosen is None else pages.index_select(0, chosen))

    def _indices(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64).to(self._device)

    @staticmethod
    def _part(memory: torch.Tensor, count: int, size: int) -> torch.Tensor:
        return memory[: count * size].view(count, size)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _words(view: torch.Tensor) -> torch.Tensor:
    """The same memory in units of eight bytes, which kernels move faster, where it divides so."""
    sizes = (view.shape[1], view.stride(0), view.storage_offset())
    aligned = all(size % 8 == 0 for size in sizes) and view.stride(1) == 1
    return view.view(torch.int64) if aligned else view


def _groups(items: Sequence[T], size: int) -> list[Sequence[T]]:
    step = max(1, size)
    return [items[i : i + step] for i in range(0, len(items), step)]
