"""The directory: which nodes there are, what they hold, who leads. Beliefs, never on a request's path.

A node's record and its block lists are bound to the node's lease: they vanish when it is not
renewed. Lists are the node's own messages (`Snapshot` parts, then `EventBatch`es), so that whoever
reads them feeds a `PrefixIndex` with them and sees gaps and incarnations as in the node's stream.
An address is never an identity: a record names node, incarnation and where that one is reached.

DirectoryError
├── DirectoryUnavailableError  no answer within the bound; nothing may be known about a write
├── DirectoryReadOnlyError     the store takes no writes now (its quota is reached)
├── LeaseLostError             the lease is over: register again, with a new one
├── OutdatedError              a younger incarnation of the node, or another leader, is there
└── CompactedError             that past is no longer known: list again
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec

from workers.core.errors import PeriluneError
from workers.core.messages import EventBatch, Snapshot


class DirectoryError(PeriluneError):
    """Root of what a directory says."""


class DirectoryUnavailableError(DirectoryError):
    """No answer within the bound."""


class DirectoryReadOnlyError(DirectoryError):
    """Reads work, writes do not."""


class LeaseLostError(DirectoryError):
    """The lease ran out or was revoked."""


class OutdatedError(DirectoryError):
    """Someone newer took the place."""


class CompactedError(DirectoryError):
    """The store has forgotten the revisions asked for; `revision` is the oldest it knows."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"revisions before {revision} are compacted away; list again")
        self.revision = revision


class NodeRecord(msgspec.Struct, frozen=True):
    """One life of a node. `endpoints`: where its agent is reached, nearest first."""

    node_id: str
    incarnation: int
    endpoints: list[str] = []
    pid: int = 0
    host: str = ""


ListPart = Snapshot | EventBatch


class NodeUp(msgspec.Struct, frozen=True, tag=True):
    """A node is registered, again or for the first time."""

    record: NodeRecord


class NodeGone(msgspec.Struct, frozen=True, tag=True):
    """A node's record is no longer there: withdrawn, or its lease ran out."""

    node_id: str


class ListTold(msgspec.Struct, frozen=True, tag=True):
    """A part of a node's block lists, in the node's order."""

    part: ListPart


class Watching(msgspec.Struct, frozen=True, tag=True):
    """`current`: all that is there has been told, changes follow as they come. `lost`: the store
    does not answer; what was told stays the best that is known. `reason` is for people."""

    state: Literal["current", "lost"]
    reason: str = ""


Change = NodeUp | NodeGone | ListTold | Watching


class Registration(Protocol):
    """A node's place in the directory. Not to be shared between tasks."""

    @property
    def remaining_seconds(self) -> float:
        """How long the lease surely lives, by this machine's clock; under 0 it may be over."""
        ...

    async def renew(self) -> None:
        """Extend the lease; writes no history. LeaseLostError, DirectoryUnavailableError."""
        ...

    async def tell(self, parts: Sequence[ListPart]) -> None:
        """Add parts to the node's lists; a snapshot's first part replaces all told before.

        LeaseLostError, OutdatedError, DirectoryReadOnlyError, DirectoryUnavailableError; after
        these, begin again with a snapshot.
        """
        ...

    async def withdraw(self) -> None:
        """Take record and lists away now, instead of when the lease ends. Raises nothing."""
        ...


class Leadership(Protocol):
    """The right to lead, until the lease ends. `fence` grows from leader to leader."""

    @property
    def fence(self) -> int: ...

    @property
    def remaining_seconds(self) -> float:
        """Stop leading when this is 0: another may lead then."""
        ...

    async def renew(self) -> None:
        """Extend. LeaseLostError, DirectoryUnavailableError."""
        ...

    async def write(self, key: str, value: bytes) -> None:
        """Write something of the leader's, only while it leads. OutdatedError, as `renew`."""
        ...

    async def resign(self) -> None:
        """Let another lead at once. Raises nothing."""
        ...


class Directory(Protocol):
    """One client's access. Every call ends within a few seconds, with an answer or an error."""

    async def register(self, record: NodeRecord, ttl_seconds: float) -> Registration:
        """Take the node's place. What an older incarnation had there goes in the same step.

        OutdatedError: a younger one is registered. DirectoryReadOnlyError,
        DirectoryUnavailableError.
        """
        ...

    async def nodes(self) -> list[NodeRecord]:
        """All registered nodes, by id. DirectoryUnavailableError."""
        ...

    async def lists(self, node_id: str) -> list[ListPart]:
        """What a node's current incarnation told last, in order. DirectoryUnavailableError."""
        ...

    def changes(self) -> AsyncIterator[Change]:
        """All that is there, then what changes, without end. Raises nothing: `Watching` tells.

        After a loss it goes on where it was, or tells what differs. Close it with `aclosing`.
        """
        ...

    async def campaign(self, name: str, holder: str, ttl_seconds: float) -> Leadership | None:
        """Try to become the leader; None where another one is. Errors as `register`."""
        ...

    async def leader(self, name: str) -> str | None:
        """Who leads. DirectoryUnavailableError."""
        ...

    async def read(self, key: str) -> bytes | None:
        """What a leader wrote. DirectoryUnavailableError."""
        ...

    async def check_writable(self) -> None:
        """Ask without writing. DirectoryReadOnlyError, DirectoryUnavailableError."""
        ...

    async def close(self) -> None:
        """End connections. What is registered stays until its lease ends."""
        ...
