"""The seam between the transfer engine and what moves bytes.

            TransferEngine (one thread)              per node
        post │ cancel │ poll │ close
             ▼
    Transport.connect(peer) -> Endpoint              per peer and transport: memory shm tcp rdma
             │
             ▼
        SlotMemory                                   the node's registered slots

Threads: one calls `post`, `cancel`, `poll` and `close`. An endpoint does its work inside of these
(tcp: a cancelled op is given back at once), or has threads of its transport do it (shm: an op that is
being copied stops at its next piece). `poll` never blocks: the engine waits on `fileno()` (readable:
poll has something to do) and until `wake_at()`. A transport whose device works by itself (rdma) posts work requests in `post`,
reads its completion queue in `poll` and has the completion channel's descriptor as `fileno()`.

What every endpoint promises (tests/workers/transfer/test_conformance.py):
- `post(ops)` takes a prefix of `ops` and says how many; it may take none. It raises nothing once
  the endpoint is open. What it took ends with exactly one `Completion`, or with `down`/`close`.
- A completion without a cause means: the source slot's header named the op's generation and key,
  the bytes lie in the target slot and have been verified; against the header's checksum if the op is
  a whole block, else against a checksum that the source computed over the range, from a block that
  it has verified whole. `Completion.checksum` is the header's.
- It writes only inside the op's range of the target slot's payload, never a header of the engine's
  node. On a push the receiving side clears the slot's header first, and writes it last.
- After the `Completion` of an op, after `down`, and after `close` returned, nothing of that op
  writes any more. A transport with posted work requests must flush them before it says so.
- Generations and keys are compared on both sides. `STALE` is an answer, not a failure of the path.
- `down` comes once; then every op that was taken and not completed is void. Errors are causes with a
  text for people, never exceptions. A peer that refuses the handshake gives `REFUSED`, another
  incarnation than the expected one `INCARNATION`; neither has read or written a byte by then.
- The depth that `opened` names is what the device gives (C14): the engine clamps to it.
- Nothing is readable or writable without the handshake of `workers.core.transfer_handshake`.

For registered memory: `SlotMemory.region` is one region that is mapped as long as the memory is open:
register it once, in `Transport.__init__`. It may lie on a GPU (`regions.RegionMemory`). Remote keys and the
remote base address travel in `Accepted.extra` of a handshake over a small TCP connection; they are
valid for that incarnation only, so a reconnect always repeats the handshake. A one-sided read
fetches the remote header too (before or after the payload): `Found` and `judge_source` compare it,
`Slab.payload` and `checksum_of` verify, as the tcp transport does on the side of the source.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from workers.core.transfer_handshake import SlabFacts
from workers.core.transfer_types import Cause, Completion, Op
from workers.core.transfer_verify import Found
from workers.pool.arena import Slab


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """How to reach a node: `addresses` by transport name. `incarnation` 0: whichever answers.

    tcp: "host:port"; shm: the slab's path; rdma: "host:port" of its handshake.
    `facts` is for transports without a handshake connection (shm).
    """

    node_id: str
    addresses: Mapping[str, str]
    incarnation: int = 0
    facts: SlabFacts | None = None


@dataclass(frozen=True, slots=True)
class OpenedBy:
    """The endpoint is ready. `depth`: ops that it takes at once."""

    depth: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class DownBy:
    cause: Cause
    text: str
    incarnation: int = 0  # of who answers instead, with `Cause.INCARNATION`


@dataclass(slots=True)
class Report:
    """What a `poll` found. `opened` comes before the first completion, `down` after the last."""

    completions: list[Completion] = field(default_factory=list)
    moved_bytes: int = 0
    opened: OpenedBy | None = None
    down: DownBy | None = None


class Endpoint(ABC):
    """A connection to one peer. See the module for the promises."""

    @abstractmethod
    def post(self, ops: Sequence[Op]) -> int:
        """Start a prefix of these ops; its length."""

    @abstractmethod
    def cancel(self, op_ids: Sequence[int]) -> None:
        """Give these up: each ends with `Cause.CANCELLED`, or with what it had become by then."""

    @abstractmethod
    def poll(self, now: float) -> Report:
        """Move what can be moved without waiting, in a bounded amount."""

    @abstractmethod
    def close(self) -> None:
        """End it, at once. Idempotent."""

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something to do; -1: there is none."""
        return -1

    def wake_at(self, now: float) -> float | None:
        """When `poll` has something to do by itself; `now` where it has at once."""
        return None


class Transport(ABC):
    """A way of moving bytes. Made once for a node, with its memory."""

    name: str
    pushes = True
    """Can it write into slots that a peer reserved?"""

    @abstractmethod
    def connect(self, peer: PeerAddress, incarnation: int) -> Endpoint:
        """Start to connect; never waits, never raises for a peer's sake: `poll` says `down`."""

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Give back what the transport itself holds. Its endpoints are closed before."""


class MemoryKind(StrEnum):
    """Whose memory it is."""

    HOST = "host"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Region:
    """Memory by its address, to be registered with a device that writes or reads it by itself.

    `dmabuf`: a descriptor that stands for the same memory, `dmabuf_offset` bytes in; -1: none. A
    device registers by it where it can (peer access without a kernel module), else by the address.
    """

    address: int
    num_bytes: int
    kind: MemoryKind = MemoryKind.HOST
    dmabuf: int = -1
    dmabuf_offset: int = 0


class SlotMemory:
    """The slots of this node as transports see them: a slab, and what peers compare.

    Held open by its owner for as long as any transport uses it.
    """

    kind = MemoryKind.HOST
    copies = False
    """`arrived` and `verified` have something to do."""

    def __init__(self, slab: Slab, facts: SlabFacts, incarnation: int = 0) -> None:
        if (slab.slot_bytes, slab.header_bytes) != (facts.slot_bytes, facts.header_bytes):
            raise ValueError(
                f"slots of {slab.slot_bytes} + {slab.header_bytes} bytes, "
                f"facts say {facts.slot_bytes} + {facts.header_bytes}"
            )
        self.slab = slab
        self.facts = facts
        self.incarnation = incarnation
        self.num_slots = slab.num_slots
        self.payload_bytes = slab.slot_bytes - slab.header_bytes
        self.num_bytes = slab.num_slots * slab.slot_bytes

    @property
    def address(self) -> int:
        """Of slot 0's header, in this process. Slot i is `i * slot_bytes` further on."""
        first = self.slab.payload(0)
        return ctypes.addressof(ctypes.c_char.from_buffer(first)) - self.slab.header_bytes

    @property
    def region(self) -> Region:
        """What a device is to register."""
        return Region(self.address, self.num_bytes)

    def payload_address(self, slot: int) -> int:
        """Where a device puts the slot's payload."""
        return self.address + slot * self.slab.slot_bytes + self.slab.header_bytes

    def stage(self, reason: str) -> bool:
        """A device cannot register `region`: give it one that it can. False: there is no other."""
        return False

    def arrived(self, slot: int, offset: int, length: int) -> None:
        """A device has put these bytes there: `range` must show them from now on."""

    def verified(self, slot: int, offset: int, length: int) -> None:
        """They are right: have them where their owner wants them."""

    def found(self, slot: int) -> Found | None:
        """The slot's header, or None where no whole block is."""
        header = self.slab.read_header(slot)
        if header is None:
            return None
        return Found(header.generation, header.key, header.length, header.checksum)

    def range(self, slot: int, offset: int, length: int) -> memoryview:
        """Bytes of a slot's payload. The caller has checked the bounds."""
        return self.slab.payload(slot, offset + length)[offset:]


class PushTarget(Protocol):
    """Says which slots of this node a peer may fill (R26). Called from server threads."""

    def claim(self, slot: int, generation: int, key: bytes, length: int) -> bool:
        """May this block be written there now? True gives the slot to the writer."""
        ...

    def landed(self, slot: int, generation: int, checksum: int) -> None:
        """The block is whole and verified, its header written."""
        ...

    def lost(self, slot: int, generation: int) -> None:
        """The write failed: the slot has no header, and may be claimed again."""
        ...
