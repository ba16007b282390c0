"""Token ids of pieces of text, the most recently used ones, bounded by bytes.

Ids are arrays of typecode "i": as block hashes take them, and joined by a copy.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

DEFAULT_BYTES: Final = 32 * 1024 * 1024
_ENTRY_BYTES: Final = 320  # measured: dict entry, key tuple, two object heads
_CHAR_BYTES: Final = 2


class TokenCache:
    """Of several tokenizers, each under a tag of its own. Not safe for threads."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[tuple[int, str], array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tag: int, text: str) -> "array[int] | None":
        key = (tag, text)
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def get_all(self, tag: int, texts: Sequence[str]) -> "list[array[int] | None]":
        """Of each text, in order."""
        keys = [(tag, text) for text in texts]
        found = list(map(self._entries.get, keys))
        use = self._entries.move_to_end
        for key, ids in zip(keys, found, strict=True):
            if ids is not None:
                use(key)
        return found

    def put(self, tag: int, text: str, tokens: "array[int]") -> None:
        """One that is larger than a quarter of all is not kept."""
        size = _size(text, tokens)
        key = (tag, text)
        if size > self.max_bytes // 4 or key in self._entries:
            return
        self._entries[key] = tokens
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            (_, old), gone = self._entries.popitem(last=False)
            self.num_bytes -= _size(old, gone)

    def forget(self, tag: int) -> None:
        """A tokenizer that is gone."""
        for key in [key for key in self._entries if key[0] == tag]:
            self.num_bytes -= _size(key[1], self._entries.pop(key))


def _size(text: str, tokens: "array[int]") -> int:
    return _ENTRY_BYTES + _CHAR_BYTES * len(text) + 4 * len(tokens)
