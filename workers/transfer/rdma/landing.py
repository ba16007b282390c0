"""The checksum of bytes that land in parts, taken while later parts are still on their way."""

from __future__ import annotations

from time import perf_counter

import xxhash


class Landing:
    """xxh3_64 over `view`, which is filled by parts in any order. `seconds`: spent on it."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._hash = xxhash.xxh3_64()
        self._done = 0
        self._parts: dict[int, int] = {}  # landed ahead of their turn: start and length
        self.seconds = 0.0

    def landed(self, start: int, length: int) -> None:
        """These bytes are there, and change no more."""
        self._parts[start] = length
        begun = perf_counter()
        while (count := self._parts.pop(self._done, 0)) > 0:
            self._hash.update(self._view[self._done : self._done + count])
            self._done += count
        self.seconds += perf_counter() - begun

    def digest(self) -> int:
        """Once all has landed."""
        assert self._done == len(self._view)
        return self._hash.intdigest()
