"""Values of the transfer engine: what is to be moved, and the words of its state machine.

A transfer is a set of pieces; a piece is a byte range of one block, from a slot of one node into a
slot of another. The engine cuts pieces into ops, the unit that a transport moves and that is
verified and retried. Offsets count from the payload's first byte; the slot's header does not travel
as bytes but as numbers that both sides check.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

KEY_BYTES: Final = 16
SMALL_PIECE_BYTES: Final = 64 * 1024
"""Below this, per-piece costs outweigh the wire's (R21): such ops are counted and shown."""


class Priority(StrEnum):
    """Blocks that the first token waits for go before those that may be needed later (R16)."""

    FIRST_TOKEN = "first_token"  # noqa: S105  no password
    BATCH = "batch"


class Direction(StrEnum):
    """Seen from the node that runs the engine."""

    PULL = "pull"  # remote slot -> local slot
    PUSH = "push"  # local slot -> slot reserved at the remote node; whole blocks only


class Cause(StrEnum):
    """Why an op failed or a piece is missing."""

    STALE = "stale"  # the slot holds another block by now, or none
    CORRUPT = "corrupt"  # the bytes do not have the checksum that they must have
    TIMEOUT = "timeout"  # nothing moved for too long
    CONNECTION = "connection"  # the path broke
    REFUSED = "refused"  # the peer said no: handshake, or a slot that is not reserved
    INCARNATION = "incarnation"  # the peer is not the process that the request means
    PEER_DOWN = "peer_down"  # the breaker is open
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    NO_ROOM = "no_room"  # the engine's own bound
    BOUNDS = "bounds"  # a slot or range that the other side does not have


RETRYABLE: Final = frozenset({Cause.CORRUPT, Cause.TIMEOUT, Cause.CONNECTION})
LINK_CAUSES: Final = frozenset({Cause.TIMEOUT, Cause.CONNECTION, Cause.REFUSED, Cause.INCARNATION})


PATH_CAUSES: Final = frozenset({Cause.TIMEOUT, Cause.CONNECTION, Cause.REFUSED, Cause.PEER_DOWN})
"""The path lost it: another path may do."""


class LinkId(NamedTuple):
    """One path: a peer node by one transport."""

    peer: str
    transport: str


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes `offset .. offset + length` of one block's payload; the default is the whole block.

    The source's generation is what its header must say, the target's is what its header will say.
    """

    remote_slot: int
    remote_generation: int
    local_slot: int
    local_generation: int
    key: bytes
    block_length: int
    offset: int = 0
    length: int = -1

    @property
    def end(self) -> int:
        return self.block_length if self.length < 0 else self.offset + self.length

    @property
    def num_bytes(self) -> int:
        return self.end - self.offset

    @property
    def whole(self) -> bool:
        return self.offset == 0 and self.end == self.block_length


class Op(msgspec.Struct, frozen=True, gc=False):
    """What a transport moves. `id` is unique for each attempt."""

    id: int
    direction: Direction
    piece: Piece
    offset: int
    length: int

    @property
    def whole(self) -> bool:
        """It carries the whole block, so that the header's checksum verifies it."""
        return self.length == self.piece.block_length


class Completion(msgspec.Struct, frozen=True, gc=False):
    """The end of an op. `cause` None: the bytes are in place and verified.

    `checksum` is xxh3_64 over the whole block, as in the source slot's header. `moving_seconds`: how
    long ago its first byte moved, where the transport kept it waiting before; 0: it did not.
    """

    op_id: int
    cause: Cause | None
    checksum: int = 0
    verify_seconds: float = 0.0
    moving_seconds: float = 0.0


class TransferRequest(msgspec.Struct, frozen=True):
    """One move. `deadline` is monotonic seconds of the engine's clock.

    `piece_bytes` cuts pieces into ops of at most that size (packetised); 0 moves each piece in one
    op (whole). `incarnation` is the peer's, 0 means whichever answers.
    """

    transfer_id: str
    peer: str
    pieces: tuple[Piece, ...]
    deadline: float
    priority: Priority = Priority.FIRST_TOKEN
    direction: Direction = Direction.PULL
    incarnation: int = 0
    piece_bytes: int = 0


class TransferState(StrEnum):
    """pending -> in_flight -> completed | failed."""

    PENDING = "pending"  # no op posted yet
    IN_FLIGHT = "in_flight"
    COMPLETED = "completed"  # every piece is in place and verified
    FAILED = "failed"  # some pieces are missing


class Timing(msgspec.Struct, frozen=True, gc=False):
    """Seconds of one transfer. `wire` is from the first byte (as far as the transport tells of it,
    else from the first post) to the end, less `verify`."""

    queue_wait: float = 0.0
    setup: float = 0.0
    wire: float = 0.0
    verify: float = 0.0

    @property
    def total(self) -> float:
        return self.queue_wait + self.setup + self.wire + self.verify


class TransferResult(msgspec.Struct, frozen=True):
    """The end of a transfer: every piece is either in place and verified, or listed as missing."""

    transfer_id: str
    link: LinkId
    state: TransferState
    num_pieces: int
    num_bytes: int  # verified
    missing: dict[int, Cause]  # by index into the request's pieces
    timing: Timing
    num_retries: int = 0
    priority: Priority = Priority.FIRST_TOKEN
    direction: Direction = Direction.PULL
    detail: str = ""  # the link's last error, for people

    @property
    def breaks_link(self) -> bool:
        """The path failed it. A slot that is no longer reserved for a push is no fault of the path."""
        causes = LINK_CAUSES.intersection(self.missing.values())
        return bool(causes - {Cause.REFUSED} if self.direction is Direction.PUSH else causes)


class TransferLimits(msgspec.Struct, frozen=True):
    """Bounds of one engine. Seconds and bytes."""

    window_bytes: int = 64 << 20  # in flight on one link: some of the largest blocks
    window_ops: int = 256  # as well; the device may give less
    batch_share: float = 0.5  # of the window for the second class
    refill_bytes: int = 1 << 20  # post again when so much of the window is free
    max_transfers: int = 4096
    max_links: int = 256
    max_attempts: int = 4  # of one op
    retry_floor_bytes: int = 64 << 20  # may be sent again on a link whatever was sent before
    retry_share: float = 0.1  # of what arrived
    backoff_seconds: float = 0.05
    max_backoff_seconds: float = 30.0
    max_op_backoff_seconds: float = 1.0
    connect_seconds: float = 1.0
    stall_seconds: float = 1.5  # ops in flight and no byte moved
    cancel_seconds: float = 0.5  # for a transport to give cancelled ops back
    idle_seconds: float = 60.0  # an unused endpoint is closed
    breaker_failures: int = 3  # of the link in a row
    max_post_refusals: int = 8  # in a row, with nothing in flight


class CapRule(msgspec.Struct, frozen=True):
    """What links may carry, in bytes a second; 0 in all of them: as much as they can.

    `rate` goes before `share`, which is of `link_rate`, or of the best that the link has shown. A
    link that has shown nothing yet is not capped by share. Shared memory is no link.
    """

    share: float = 0.0
    rate: float = 0.0
    link_rate: float = 0.0

    def of(self, transport: str, best_rate: float) -> float:
        """The cap of one link; 0: none."""
        if transport == "shm":
            return 0.0
        return self.rate or self.share * (self.link_rate or best_rate)


# --- events: what happened ------------------------------------------------------------------


class Submitted(msgspec.Struct, frozen=True):
    request: TransferRequest
    transport: str


class CancelRequested(msgspec.Struct, frozen=True):
    transfer_id: str
    cause: Cause = Cause.CANCELLED


class Opened(msgspec.Struct, frozen=True):
    """The endpoint is ready. `depth` is how many ops the device takes at once."""

    link: LinkId
    depth: int
    incarnation: int


class Down(msgspec.Struct, frozen=True):
    """The endpoint is gone and writes nothing any more.

    With `Cause.INCARNATION`, `incarnation` is that of who answered instead, if it is known.
    """

    link: LinkId
    cause: Cause
    text: str = ""
    incarnation: int = 0


class Posted(msgspec.Struct, frozen=True):
    """What became of a `Post`: the first `num_accepted` of its ops are under way."""

    link: LinkId
    op_ids: list[int]
    num_accepted: int


class Completed(msgspec.Struct, frozen=True):
    link: LinkId
    completions: list[Completion]


class Progressed(msgspec.Struct, frozen=True):
    """Bytes moved, though no op has ended."""

    link: LinkId


class Sealed(msgspec.Struct, frozen=True):
    """What became of a `Seal` that had to be verified."""

    transfer_id: str
    local_slot: int
    ok: bool
    verify_seconds: float = 0.0


class CapSet(msgspec.Struct, frozen=True):
    """Cap a link at this many bytes a second; 0 lifts the cap. It goes before `LimitsSet`'s rule."""

    link: LinkId
    bytes_per_second: float


class LimitsSet(msgspec.Struct, frozen=True):
    """Other bounds from now on, and another rule for the caps of all links."""

    limits: TransferLimits
    cap: CapRule = CapRule()


class Ticked(msgspec.Struct, frozen=True):
    """Time passed."""


Event = (
    Submitted
    | CancelRequested
    | Opened
    | Down
    | Posted
    | Completed
    | Progressed
    | Sealed
    | CapSet
    | LimitsSet
    | Ticked
)

# --- commands: what the shell must do -------------------------------------------------------


class Open(msgspec.Struct, frozen=True):
    """Start connecting; `Opened` or `Down` follows."""

    link: LinkId
    incarnation: int


class Close(msgspec.Struct, frozen=True):
    """End the endpoint. When this returns, nothing writes a slot any more; no event follows."""

    link: LinkId


class Post(msgspec.Struct, frozen=True):
    """Hand these ops to the endpoint, in order; answered by `Posted`, before any `Completed`."""

    link: LinkId
    ops: list[Op]


class CancelOps(msgspec.Struct, frozen=True):
    """Give these ops up; each still ends with a `Completion`."""

    link: LinkId
    op_ids: list[int]


class Seal(msgspec.Struct, frozen=True):
    """All bytes of a pulled block are in place: write its header.

    `verified` False: hash the payload first and answer with `Sealed`.
    """

    transfer_id: str
    piece: Piece  # any of the block's
    checksum: int
    verified: bool


class Arrived(msgspec.Struct, frozen=True):
    """These pieces' bytes are in place and verified: a layer may be used."""

    transfer_id: str
    indices: list[int]


class Finish(msgspec.Struct, frozen=True):
    result: TransferResult


class Alarm(msgspec.Struct, frozen=True):
    """A link's breaker opened (`raised`) or closed again. One each, however often it fails."""

    link: LinkId
    raised: bool
    text: str


Command = Open | Close | Post | CancelOps | Seal | Arrived | Finish | Alarm
