"""Block keys of prompts, whose beginnings come again and again: a stretch of blocks that has been
seen is found by its tokens at once, instead of block by block."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from workers.core.hashing import block_hashes, root_hash
from workers.core.ids import BlockHash

STRETCH_BLOCKS: Final = 16
MAX_ROOTS: Final = 1024
DEFAULT_BYTES: Final = 8 * 1024 * 1024
_KEY_BYTES: Final = 64
"""Of a block's key in memory, with its place in a list."""


class KnownChains:
    """The stretches used last, bounded by bytes. What is found equals what would be computed: the
    whole of the tokens is compared, and the key of the block before them."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._known: OrderedDict[tuple[bytes, bytes], list[BlockHash]] = OrderedDict()
        self._roots: dict[tuple[bytes, str | None], bytes] = {}

    def root(self, namespace: bytes, salt: str | None) -> bytes:
        """As `root_hash`, without LoRA."""
        root = self._roots.get((namespace, salt))
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[namespace, salt] = root_hash(namespace, salt, None)
        return root

    def keys(self, root: bytes, tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
        """As `block_hashes`. Only arrays of typecode "i" are looked up."""
        stretch = STRETCH_BLOCKS * block_tokens
        if len(tokens) < stretch or not isinstance(tokens, array) or tokens.typecode != "i":
            return block_hashes(root, tokens, block_tokens)
        found: list[BlockHash] = []
        start, parent = 0, root
        while len(tokens) - start >= stretch:
            piece = tokens[start : start + stretch]
            keys = self._stretch(parent, piece, block_tokens)
            found += keys
            start, parent = start + stretch, keys[-1]
        return found + block_hashes(parent, tokens[start:], block_tokens)

    def _stretch(self, parent: bytes, piece: "array[int]", block_tokens: int) -> list[BlockHash]:
        name = (parent, piece.tobytes())
        keys = self._known.get(name)
        if keys is not None:
            self._known.move_to_end(name)
            return keys
        keys = self._known[name] = block_hashes(parent, piece, block_tokens)
        self.num_bytes += _size(name[1], keys)
        while self.num_bytes > self._max_bytes:
            (_, tokens), gone = self._known.popitem(last=False)
            self.num_bytes -= _size(tokens, gone)
        return keys


def _size(tokens: bytes, keys: list[BlockHash]) -> int:
    return len(tokens) + _KEY_BYTES * (len(keys) + 4)
