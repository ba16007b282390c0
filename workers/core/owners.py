"""Owners of pins and writes, with their leases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from workers.core.blocks import Block
from workers.core.errors import PeriluneError
from workers.core.ids import OwnerId

TRANSFER_PREFIX: Final = "transfer:"
MAX_OWNERS: Final = 65_536


class TooManyOwnersError(PeriluneError):
    """The bound on owners is reached: a client takes pins and never releases them."""


@dataclass(slots=True)
class Load:
    """What an owner reads. It ends well by `Release` and badly by anything else."""

    worker: str
    started: float
    blocks: set[Block] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Owner:
    """`client` is the connection that spoke last for it; a transfer outlives connections."""

    id: OwnerId
    client: int
    deadline: float
    pins: set[Block] = field(default_factory=set)
    writes: set[Block] = field(default_factory=set)
    load: Load | None = None
    renewed: bool = False

    @property
    def outlives_connections(self) -> bool:
        return self.id.startswith(TRANSFER_PREFIX)


class OwnerTable:
    """At most `max_owners` owners; each has a deadline in the caller's clock."""

    def __init__(self, max_owners: int = MAX_OWNERS) -> None:
        self._max_owners = max_owners
        self._owners: dict[OwnerId, Owner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def get(self, owner_id: OwnerId) -> Owner | None:
        return self._owners.get(owner_id)

    def open(self, owner_id: OwnerId, client: int, deadline: float) -> Owner:
        """The owner with its lease extended, made if there is none. TooManyOwnersError."""
        owner = self._owners.get(owner_id)
        if owner is None:
            if len(self._owners) >= self._max_owners:
                raise TooManyOwnersError(
                    f"owner = {owner_id!r}: {self._max_owners} owners hold pins already. "
                    "Release what is done, or shorten the lease."
                )
            owner = self._owners[owner_id] = Owner(owner_id, client, deadline)
        owner.client = client
        owner.deadline = max(owner.deadline, deadline)
        return owner

    def close_if_idle(self, owner: Owner) -> None:
        """Forget an owner that holds nothing."""
        if not owner.pins and not owner.writes and owner.load is None:
            self._owners.pop(owner.id, None)

    def expired(self, now: float) -> list[Owner]:
        return [owner for owner in self._owners.values() if owner.deadline <= now]

    def of_client(self, client: int) -> list[Owner]:
        return [owner for owner in self._owners.values() if owner.client == client]

    def all(self) -> list[Owner]:
        return list(self._owners.values())
