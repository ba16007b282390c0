"""Which nodes hold which blocks of one namespace: one bit mask a block, two bits a node.

A node has a column: one bit says that it holds the block, the bit above it that this is on SSD
only. What a node holds is prefix-closed, so along a chain masks only lose bits, and the places
where they do are found by bisection: about log2(length) look-ups for each distinct prefix length,
however many nodes there are. A column is emptied in no time by taking a new one; the bits of the
old one are swept out of the masks bit by bit later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Final

from workers.core.ids import NodeId

MAX_RETIRED_COLUMNS: Final = 64
"""Beyond it the sweep is finished at once, so that masks stay short."""
MAX_CACHED_GROUPS: Final = 4096
MAX_CACHED_MASKS: Final = 65_536

Look = Callable[[bytes], int | None]


@dataclass(slots=True, eq=False)
class Column:
    """A node's two bits in every mask. `held` is 1 << an even number, `disk` the bit above."""

    space: BlockHolders
    node_id: NodeId
    held: int
    disk: int = field(init=False)
    both: int = field(init=False)
    num_blocks: int = 0
    num_on_disk: int = 0

    def __post_init__(self) -> None:
        self.disk, self.both = self.held << 1, self.held * 3


class BlockHolders:
    """Masks by block key. Only columns that are live count in what is read."""

    def __init__(self) -> None:
        self.masks: dict[bytes, int] = {}
        self.version = 0  # moves when bits come to mean other nodes
        self._live = 0  # the `held` bits of live columns
        self._columns: dict[int, Column] = {}  # by `held` bit; those of snapshots being taken too
        self._free: list[int] = []
        self._retired: list[int] = []
        self._sweeping: list[int] = []  # columns that the sweep under way takes out
        self._sweep_keys: Iterator[bytes] | None = None
        self._groups: dict[int, tuple[NodeId, ...]] = {}
        self._shared_masks: dict[int, int] = {}
        self._guess = 0  # the shortest prefix of the query before

    # --- columns ----------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self._columns and not self.masks

    @property
    def is_swept(self) -> bool:
        """Whether no closed column has left bits."""
        return not self._retired and not self._sweeping

    def open(self, node_id: NodeId) -> Column:
        """A new, empty column that is not live yet."""
        taken = len(self._columns) + len(self._retired) + len(self._sweeping)
        held = self._free.pop() if self._free else 1 << 2 * taken
        column = self._columns[held] = Column(self, node_id, held)
        return column

    def go_live(self, column: Column) -> None:
        self._live |= column.held
        self._forget_groups()

    def close(self, column: Column) -> None:
        """Nothing of it counts from now on."""
        del self._columns[column.held]
        self._live &= ~column.held
        self._forget_groups()
        if not column.num_blocks:
            self._free.append(column.held)
            return
        self._retired.append(column.held)
        if len(self._retired) > MAX_RETIRED_COLUMNS:
            while self._retired or self._sweeping:
                self.sweep(len(self.masks) + 1)

    def sweep(self, num_keys: int) -> None:
        """Take the bits of closed columns out of the next `num_keys` masks."""
        if self._sweep_keys is None:
            if not self._retired:
                return
            self._sweeping, self._retired = self._retired, []
            self._sweep_keys = iter(list(self.masks))  # later keys never had these bits
        gone = sum(self._sweeping) * 3
        keys = list(islice(self._sweep_keys, num_keys))
        for key in keys:
            mask = self.masks.get(key, 0)
            if mask & gone:
                self._put(key, mask & ~gone)
        if len(keys) < num_keys:
            self._free += self._sweeping
            self._sweeping, self._sweep_keys = [], None

    # --- changes ----------------------------------------------------------------------------

    def store(self, column: Column, keys: Sequence[bytes], on_disk: bool) -> None:
        """`column` holds `keys`, in memory or on SSD only."""
        masks = self.masks
        bits = column.both if on_disk else column.held
        num_before = len(masks)
        found: Sequence[int] = ()
        if masks.keys().isdisjoint(keys):  # most; and what was looked at is near when it is set
            for key in keys:
                masks[key] = bits
        else:
            found = list(map(masks.setdefault, keys, repeat(bits)))
        num_fresh = len(masks) - num_before
        column.num_blocks += num_fresh
        if on_disk:
            column.num_on_disk += num_fresh
        if found and num_fresh != len(found):
            self._join(column, bits, keys, found)

    def _join(self, column: Column, bits: int, keys: Sequence[bytes], found: Sequence[int]) -> None:
        """`keys` had the masks `found`: those that were known get `bits` as well."""
        others, on_disk = ~column.both, bits != column.held
        last, new = bits, bits
        was_held, disk_change = True, 0
        for key, mask in zip(keys, found, strict=True):
            if mask != last:  # neighbours mostly share a mask: computed, and kept, once for all
                last, new = mask, self._shared(mask & others | bits)
                was_held = bool(mask & column.held)
                disk_change = on_disk - bool(mask & column.disk)
            if new != mask:
                self.masks[key] = new
                column.num_blocks += not was_held
                column.num_on_disk += disk_change

    def refresh(self, keys: Sequence[bytes]) -> None:
        """Those of `keys` that are known are the youngest now."""
        masks = self.masks
        for key in keys:
            mask = masks.pop(key, 0)
            if mask:
                masks[key] = mask

    def move(self, column: Column, keys: Iterable[bytes], on_disk: bool) -> None:
        """Those of `keys` that `column` holds are in that tier now."""
        for key in keys:
            mask = self.masks.get(key, 0)
            if mask & column.held and bool(mask & column.disk) != on_disk:
                self.masks[key] = mask ^ column.disk
                column.num_on_disk += 1 if on_disk else -1

    def remove(self, column: Column, keys: Iterable[bytes]) -> None:
        """`column` holds none of `keys`."""
        others, held = ~column.both, column.held
        masks = self.masks
        for key in keys:
            mask = masks.get(key, 0)
            if mask == held:  # nobody else's, in memory: most
                column.num_blocks -= 1
                del masks[key]
            elif mask & held:
                column.num_blocks -= 1
                if mask & column.disk:
                    column.num_on_disk -= 1
                self._put(key, self._shared(mask & others))

    def drop_oldest(self, num_keys: int) -> int:
        """Forget the entries believed first, of all nodes; how many."""
        keys = list(islice(self.masks, num_keys))
        for key in keys:
            mask = self.masks.pop(key)
            for column in self._columns.values():
                if mask & column.held:
                    column.num_blocks -= 1
                    column.num_on_disk -= bool(mask & column.disk)
        return len(keys)

    # --- reading ----------------------------------------------------------------------------

    def held(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """(prefix length, `held` bits of those who hold just so much); nobody's 0 is left out."""
        groups = prefix_groups(self.masks.get, self._live, keys, self._guess)
        if groups:
            self._guess = groups[0][0]  # prompts of one application begin with the same blocks
        return groups

    def held_in_memory(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """As `held`, without what lies on SSD only."""
        get = self.masks.get

        def look(key: bytes) -> int:
            mask = get(key, 0)
            return mask & ~(mask >> 1)

        return prefix_groups(look, self._live, keys)

    def names(self, held_bits: int) -> tuple[NodeId, ...]:
        """The nodes of these bits."""
        names = self._groups.get(held_bits)
        if names is None:
            if len(self._groups) >= MAX_CACHED_GROUPS:
                self._groups.clear()
            columns = self._columns.values()
            names = tuple(column.node_id for column in columns if column.held & held_bits)
            self._groups[held_bits] = names
        return names

    def on_disk(self, column: Column, key: bytes) -> bool | None:
        """Whether `column` has it on SSD only; None where it does not hold it."""
        mask = self.masks.get(key, 0)
        return bool(mask & column.disk) if mask & column.held else None

    def _forget_groups(self) -> None:
        self._groups.clear()
        self.version += 1

    def _shared(self, mask: int) -> int:
        """The one object for this value: reading then stays within the processor's caches."""
        if len(self._shared_masks) >= MAX_CACHED_MASKS:
            self._shared_masks.clear()
        return self._shared_masks.setdefault(mask, mask)

    def _put(self, key: bytes, mask: int) -> None:
        if mask:
            self.masks[key] = mask
        else:
            del self.masks[key]


def prefix_groups(
    look: Look, live: int, keys: Sequence[bytes], guess: int = 0
) -> list[tuple[int, int]]:
    """Where along `keys` bits of `live` get lost: (blocks before, bits lost there).

    Bits missing at the first key are left out. Where what a bit stands for is not prefix-closed,
    its place is one where it is lost, not necessarily the first. `guess`: a length that is likely.
    """
    found: list[tuple[int, int]] = []
    low, low_bits = 0, (look(keys[0]) or 0) & live if keys else 0
    if not low_bits:
        return found
    high = len(keys) - 1
    high_bits = (look(keys[high]) or 0) & low_bits
    if high_bits:
        found.append((high + 1, high_bits))
    later: list[tuple[int, int, int, int]] = []  # stretches behind the one looked at
    if 0 < guess < high and low_bits != high_bits:
        bits = (look(keys[guess]) or 0) & low_bits
        later.append((guess, bits, high, high_bits & bits))
        high, high_bits = guess, bits
        if guess > 1 and bits != low_bits:
            bits = (look(keys[guess - 1]) or 0) & low_bits
            later.append((guess - 1, bits, high, high_bits & bits))
            high, high_bits = guess - 1, bits
    while True:
        while high - low > 1 and low_bits != high_bits:
            middle = (low + high) >> 1
            bits = (look(keys[middle]) or 0) & low_bits
            if bits != high_bits:
                later.append((middle, bits, high, high_bits & bits))
                high_bits = bits
            high = middle
        if low_bits != high_bits:
            found.append((low + 1, low_bits & ~high_bits))
        if not later:
            return found
        low, low_bits, high, high_bits = later.pop()
