"""Token ids of pieces of text, the most recently used ones, bounded by bytes.

Ids are the bytes of an array of typecode "i": as block hashes take them, joined by a copy, and
nothing that the collector would look at.
"""

from collections.abc import Sequence
from typing import Final

from controlplane.core.recency import RecencyMap

DEFAULT_BYTES: Final = 32 * 1024 * 1024
_ENTRY_BYTES: Final = 210  # measured: dict entry with its links, two object heads
_CHAR_BYTES: Final = 2
_USUAL_BYTES: Final = 512  # of an entry with its text and ids


class TokenCache:
    """Of several tokenizers, each under a tag of its own. Not safe for threads."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self._by_tag: dict[int, RecencyMap[str, bytes]] = {}
        self._bytes: dict[int, int] = {}  # by tag

    def __len__(self) -> int:
        return sum(map(len, self._by_tag.values()))

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def get(self, tag: int, text: str) -> bytes | None:
        return self.get_all(tag, [text])[0]

    def get_all(self, tag: int, texts: Sequence[str]) -> list[bytes | None]:
        """Of each text, in order."""
        entries = self._by_tag.get(tag)
        if entries is None:
            return [None] * len(texts)
        return entries.get_all(texts)

    def put(self, tag: int, text: str, ids: bytes) -> None:
        """One that is larger than a quarter of all is not kept. Where room is wanted, the tokenizer
        that has most gives its oldest."""
        size = _size(text, ids)
        if size > self.max_bytes // 4:
            return
        entries = self._by_tag.get(tag)
        if entries is None:
            entries = self._by_tag[tag] = RecencyMap(self.max_bytes // _USUAL_BYTES)
        if text in entries:
            return
        entries.put(text, ids)
        self._bytes[tag] = self._bytes.get(tag, 0) + size
        while self.num_bytes > self.max_bytes:
            most = max(self._bytes, key=self._bytes.__getitem__)
            self._bytes[most] -= _size(*self._by_tag[most].pop_oldest())

    def forget(self, tag: int) -> None:
        """A tokenizer that is gone."""
        self._by_tag.pop(tag, None)
        self._bytes.pop(tag, None)


def _size(text: str, ids: bytes) -> int:
    return _ENTRY_BYTES + _CHAR_BYTES * len(text) + len(ids)
