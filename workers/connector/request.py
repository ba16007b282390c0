"""What the planner knows of one request, and how the node agent looks to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from workers.connector.metadata import LoadResult
from workers.connector.promotion import Promotion
from workers.core.ids import BlockHash
from workers.core.messages import LegReport, LookupReply, SlotRef
from workers.core.transfer_messages import HolderRef

Urgency = Literal["first_token", "batch"]
SessionHint = Literal["", "continue", "over"]


class PoolCalls(Protocol):
    """The node agent as the planner sees it. Every call is bounded; None means no answer."""

    @property
    def namespace(self) -> bytes:
        """Digest of this engine's namespace; empty until the worker half has registered it."""

    @property
    def incarnation(self) -> int:
        """The agent's incarnation; 0 while none is connected."""

    def lookup(
        self, chains: Sequence[Sequence[bytes]], requests: Sequence[str]
    ) -> list[LookupReply] | None:
        """How much of each chain is held: one round trip for all of them. For whom: one each."""

    def prepare_load(self, owner: str, hashes: Sequence[bytes]) -> list[SlotRef] | None:
        """Pin the held prefix of `hashes`; its slots."""

    def promote(self, owner: str, hashes: Sequence[bytes], urgency: Urgency) -> LookupReply | None:
        """Have the agent bring `hashes` into memory, pinned for `owner`; how far it is."""

    def promote_later(self, owner: str, hashes: Sequence[bytes]) -> None:
        """The same, some time soon, for nobody who waits."""

    def fetch(
        self, owner: str, hashes: Sequence[bytes], holder: HolderRef, tenant: str
    ) -> LookupReply | None:
        """Have the agent pull what it lacks of `hashes`, a chain from its head, from that node."""

    def push(self, owner: str, hashes: Sequence[bytes], target: HolderRef, tenant: str) -> None:
        """Have the agent send this chain to that node as its blocks are stored, some time soon."""

    def pin_prefix(self, owner: str, hashes: Sequence[bytes]) -> int:
        """Pin what is held or being stored; for how many blocks, 0 without an answer."""

    def release(self, owner: str) -> None:
        """End the owner's pins, some time soon."""

    def keep(self, owner: str) -> None:
        """Renew the lease of another's pins until `let_go`; of pins taken here it is renewed."""

    def let_go(self, owner: str) -> None:
        """No longer renew."""

    def report(self, leg: LegReport) -> None:
        """Hand in a leg's report, some time soon."""

    def label(self, request: str, label: str) -> None:
        """Say which class a request belongs to, some time soon."""

    def hint(self, hashes: Sequence[bytes], session: Literal["continue", "over"]) -> None:
        """Say whether the chain's session goes on, some time soon."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The parts of an engine's request that matter here."""

    request_id: str
    prompt_token_ids: Sequence[int]
    cache_salt: str | None = None
    lora: str | None = None
    extras: Sequence[tuple[bytes, ...]] = ()
    transfer_id: str = ""
    leg: str = ""  # "prefill", "decode", or empty for a request that came past the gateway
    expected_blocks: int = 0  # of leg 2: what leg 1 stored; of leg 1: what the holder has
    holder: HolderRef | None = None  # another node, to pull these blocks from
    target: HolderRef | None = None  # of leg 1: the node of leg 2, to push its blocks to
    session: SessionHint = ""
    label: str = ""  # its class, for policies that learn by class
    tenant: str = ""  # its name, where the gateway gives one
    skip: bool = False  # reads and writes nothing of the pool, and counts as neither hit nor miss


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part of a step. `block_ids` are appended unless `replaces_blocks`."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: Sequence[int] = ()
    replaces_blocks: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A lookup's answer as indexes in the prompt's chain: before `held` all can be loaded, before
    `on_disk` the node has all; `pending` blocks after that are being written. It was asked about
    `first` up to `end`."""

    first: int
    end: int
    held: int
    on_disk: int
    pending: bool

    @staticmethod
    def of(reply: LookupReply, first: int, end: int) -> Found:
        held = first + reply.num_held
        writes = reply.num_pending > reply.num_on_disk  # what is being promoted counts in both
        return Found(first, end, held, held + reply.num_on_disk, writes)


@dataclass(slots=True)
class RequestState:
    """One request from `add` to its end."""

    info: RequestInfo
    hashes: list[BlockHash] = field(default_factory=list)
    hashed_namespace: bytes = b""
    attempt: int = 0
    load_failed: bool = False
    block_ids: list[int] = field(default_factory=list)
    store_from: int = 0  # pool blocks before this one need no store order
    # --- what the pool said, and what is waited for
    found: Found | None = None
    found_at: float = 0.0
    found_epoch: int = -1
    matched_in: int = -1  # the last step in which the engine asked
    wait_began: float | None = None
    wait_seconds: float = 0.0
    promotion: Promotion | None = None
    promoted: bool = False  # asked for, whatever came of it
    gave_up: bool = False
    pushed: bool = False  # asked for, whatever came of it
    fetched: bool = False  # asked for, whatever came of it
    fetch_began: float | None = None
    fetch_seconds: float = 0.0
    # --- what came of it
    local_tokens: int = 0
    was_allocated: bool = False
    device_hit_tokens: int = 0
    pool_hit_tokens: int = 0
    holds_pins: bool = False
    loads: list[LoadResult] = field(default_factory=list)
    stores_under_way: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0

    @property
    def tenant(self) -> str:
        """Whose quota its blocks count against."""
        return self.info.tenant or self.info.cache_salt or ""
