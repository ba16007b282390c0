"""The seam of a second tier: copies slots of the slab out and in, and knows what it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from workers.core.tiers import BlockRecord, DiskJob, Outcome

Done = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class TierOpened:
    """`records`: what was found of a former life, not verified yet: reading verifies."""

    num_slots: int
    max_slots: int
    records: list[BlockRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierFacts:
    """`state` as in `TierStats`; a long state says in words what is wrong and what to do."""

    state: str
    path: str
    cap_bytes: int
    allocated_bytes: int
    free_device_bytes: int | None


class Tier(ABC):
    """Made closed. `submit` never blocks; every `WriteOut` and `ReadIn` is reported once to `done`,
    from any thread and in any order, unless `close` came first.

    An implementation writes a block's record after its data and clears it before, so that no torn
    block is ever found; and it verifies what it copies, either way.
    """

    @abstractmethod
    def open(self) -> TierOpened:
        """Find or make the place; may take long. TierError: there is none, and why."""

    @abstractmethod
    def start(self) -> None:
        """Begin to work, once what `open` found has been taken in."""

    @abstractmethod
    def submit(self, jobs: Iterable[DiskJob]) -> None: ...

    @abstractmethod
    def facts(self) -> TierFacts: ...

    @abstractmethod
    def close(self) -> None:
        """End all work; what was submitted and not begun is dropped. Contents stay."""


class TierError(Exception):
    """The tier cannot be had; the text names the value and the way out."""
