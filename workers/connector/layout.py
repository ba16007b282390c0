"""The engine's paged KV cache as opaque pages of bytes.

A page is what one engine block holds of one layer. Kernels repack inside a page as they like, so
a page moves whole or not at all, and its format is part of the namespace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workers.connector.metadata import PageTarget
from workers.connector.staging import Incoming, Outgoing, Staging
from workers.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What the namespace says about pages."""

    dtype: str
    shape: str  # of one page, "3x32x128"
    page_bytes: tuple[int, ...]
    device: str


class PagedKv:
    """Byte views of the registered tensors, addressed by the scheduler's block ids.

    A pool block's payload is layer-major: per layer, its pages in order. Layer `i` lies from
    `offsets[i]` to `offsets[i + 1]`.
    """

    def __init__(
        self,
        kv_caches: dict[str, torch.Tensor],
        pages_per_block: int,
        staged: bool | None = None,
    ) -> None:
        """`staged`: copy many blocks at a time through pinned memory; by default where the cache is
        not the host's. Raise ConfigError where a layer's block is no single run of bytes."""
        if not kv_caches:
            raise ConfigError("model", "", "it registers no KV cache", "Use a decoder model")
        self.layer_names = sorted(kv_caches, key=_natural)
        tensors = [kv_caches[name] for name in self.layer_names]
        self._views = [
            _page_view(name, tensor) for name, tensor in zip(self.layer_names, tensors, strict=True)
        ]
        self._per_block = pages_per_block
        self.num_blocks = min(view.shape[0] for view in self._views)
        self.format = PageFormat(
            dtype="+".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors})),
            shape="+".join(sorted({"x".join(map(str, t.shape[1:])) for t in tensors})),
            page_bytes=tuple(view.shape[1] for view in self._views),
            device=tensors[0].device.type,
        )
        self._stacked = _stack(self._views)
        self.offsets = _offsets(self.format.page_bytes, pages_per_block)
        staged = self.format.device != "cpu" if staged is None else staged
        self._staging = Staging(self._views, self.offsets, pages_per_block) if staged else None

    @property
    def num_layers(self) -> int:
        return len(self._views)

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one pool block."""
        return self.offsets[-1]

    def scatter_blocks(
        self, blocks: Sequence[Incoming], first: int, last: int, copied: Callable[[int], None]
    ) -> None:
        """`scatter` for each; `copied` is told the index of each block that was just read."""
        if self._staging is not None:
            self._staging.scatter(blocks, first, last, copied)
            return
        for index, (payload, pages) in enumerate(blocks):
            self.scatter(payload, pages, first, last)
            copied(index)

    def gather_blocks(self, blocks: Sequence[Outgoing]) -> None:
        """`gather` for each."""
        if self._staging is not None:
            self._staging.gather(blocks)
            return
        for block_ids, payload in blocks:
            self.gather(block_ids, payload)

    def scatter(
        self, payload: torch.Tensor, pages: Sequence[PageTarget], first: int, last: int
    ) -> None:
        """Copy layers `first` up to `last` of a block's payload to where `pages` says.

        One strided copy a page where all layers look alike, else one a layer.
        """
        if self._stacked is not None:
            source = self._shaped(payload)
            for target in pages:
                self._stacked[first:last, target.block_id].copy_(source[first:last, target.page])
            return
        for layer in range(first, last):
            source = self._layer(payload, layer)
            for target in pages:
                self._views[layer][target.block_id].copy_(source[target.page])

    def gather(self, block_ids: Sequence[int], payload: torch.Tensor) -> None:
        """Copy all layers of a pool block's pages into `payload`."""
        if self._stacked is not None:
            sink = self._shaped(payload)
            for page, block_id in enumerate(block_ids):
                sink[:, page].copy_(self._stacked[:, block_id])
            return
        for layer, view in enumerate(self._views):
            sink = self._layer(payload, layer)
            for page, block_id in enumerate(block_ids):
                sink[page].copy_(view[block_id])

    def _shaped(self, payload: torch.Tensor) -> torch.Tensor:
        return payload.view(self.num_layers, self._per_block, self.format.page_bytes[0])

    def _layer(self, payload: torch.Tensor, layer: int) -> torch.Tensor:
        start, end = self.offsets[layer], self.offsets[layer + 1]
        return payload[start:end].view(self._per_block, self.format.page_bytes[layer])


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _page_view(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[blocks, bytes of a page] over the tensor's storage. Dimension 0 is the block."""
    page = tensor[0]
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(page.shape, page.stride(), strict=True)
    )
    if extent != page.numel():
        raise ConfigError(
            "KV cache layout",
            f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            "a block of a layer is no single run of bytes",
            "Set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC",
        )
    item = tensor.element_size()
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage.set_(tensor.untyped_storage())  # type: ignore[no-untyped-call, unused-ignore]
    return storage.as_strided(
        (tensor.shape[0], page.numel() * item),
        (tensor.stride(0) * item, 1),
        tensor.storage_offset() * item,
    )


def _stack(views: list[torch.Tensor]) -> torch.Tensor | None:
    """[layers, blocks, bytes] where all layers lie at equal distances in one storage."""
    first = views[0]
    offsets = [view.storage_offset() for view in views]
    step = offsets[1] - offsets[0] if len(views) > 1 else 0
    alike = all(
        view.shape == first.shape
        and view.stride() == first.stride()
        and view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and view.storage_offset() == offsets[0] + index * step
        for index, view in enumerate(views)
    )
    if not alike or step < 0:
        return None
    return first.as_strided((len(views), *first.shape), (step, *first.stride()), offsets[0])


def _offsets(page_bytes: tuple[int, ...], pages_per_block: int) -> list[int]:
    """Where each layer begins in a payload, and its end."""
    offsets = [0]
    for size in page_bytes:
        offsets.append(offsets[-1] + size * pages_per_block)
    return offsets
