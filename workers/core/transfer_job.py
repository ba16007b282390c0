"""One transfer: which bytes are still to be asked for, which arrived, which are missing.

Statuses of a piece:  pending -> (arrived ->) done | missing
A piece that is one op goes straight to done. Otherwise its block is gathered: when all bytes that
the request wants of it are there, it is sealed (hashed whole) if they are the whole block. A block
of which one piece is missing is missing as a whole: half a block serves nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from workers.core.transfer_types import (
    KEY_BYTES,
    Cause,
    Direction,
    LinkId,
    Piece,
    Timing,
    TransferRequest,
    TransferResult,
    TransferState,
)

PENDING: Final = 0
ARRIVED: Final = 1
DONE: Final = 2
MISSING: Final = 3


class Part(NamedTuple):
    """A range of a piece that becomes one op; `attempts` were made before."""

    piece: int
    offset: int
    length: int
    attempts: int


@dataclass(slots=True, eq=False)
class Gather:
    """A block that comes in several ops."""

    indices: list[int]
    wanted: int  # bytes of all its pieces
    covers: bool  # they are the whole block
    left: int = 0
    attempts: int = 0
    sealing: bool = False
    checksum: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """See the module. The engine owns it; `link` is where its ops go."""

    request: TransferRequest
    link: LinkId
    submitted_at: float
    status: bytearray = field(init=False)
    missing: dict[int, Cause] = field(default_factory=dict)
    requeue: deque[Part] = field(default_factory=deque)
    in_flight: dict[int, Part] = field(default_factory=dict)
    gathers: dict[int, Gather] = field(default_factory=dict)
    piece_left: dict[int, int] = field(default_factory=dict)
    unsettled: int = field(init=False)
    delayed: int = 0  # parts that wait for a retry
    sealing: int = 0
    queued: bool = False  # in its link's ready queue
    ending: Cause | None = None
    cancel_by: float = 0.0
    num_bytes: int = 0
    num_retries: int = 0
    opened_at: float | None = None  # when the link it waited for became ready
    first_post_at: float | None = None
    first_byte_at: float | None = None  # where its transport tells
    verify_seconds: float = 0.0
    _piece: int = 0
    _offset: int = -1

    def __post_init__(self) -> None:
        pieces = self.request.pieces
        self.status = bytearray(len(pieces))
        self.unsettled = len(pieces)
        self.gathers = _gathers_of(pieces)

    @property
    def done(self) -> bool:
        return not (self.unsettled or self.in_flight or self.sealing)

    @property
    def has_parts(self) -> bool:
        """There is something to post now."""
        return bool(self.requeue) or self._piece < len(self.request.pieces)

    def take(self) -> Part | None:
        """The next range to ask for: what was given back first, in order."""
        while self.requeue:
            part = self.requeue.popleft()
            if self.status[part.piece] == PENDING:
                return part
        return self._advance()

    def give_back(self, parts: list[Part]) -> None:
        """These were taken and not posted: they come next, in their order."""
        self.requeue.extendleft(reversed(parts))

    def arrived(self, part: Part) -> Gather | None:
        """Book a verified range. The gather whose block it completed, if it is of one."""
        piece = self.request.pieces[part.piece]
        if part.length == piece.block_length:
            self._settle(part.piece)
            return None
        if self.status[part.piece] != PENDING:
            return None
        gather = self._gather(part.piece, piece)
        left = self.piece_left.get(part.piece, piece.num_bytes) - part.length
        gather.left -= part.length
        assert left >= 0, "more bytes than the piece has"
        assert gather.left >= 0, "more bytes than the block has"
        self.piece_left[part.piece] = left
        if not left:
            self.status[part.piece] = ARRIVED
        return gather if not gather.left else None

    def moving_since(self, at: float) -> None:
        """A byte of it moved then, after it had waited inside of the transport."""
        self.first_byte_at = at if self.first_byte_at is None else min(at, self.first_byte_at)

    def finish_gather(self, gather: Gather) -> None:
        """All of it is in place and verified."""
        for index in gather.indices:
            self._settle(index)
            self.piece_left.pop(index, None)
        self.gathers.pop(self.request.pieces[gather.indices[0]].local_slot, None)

    def restart_gather(self, gather: Gather) -> None:
        """The block as a whole did not verify: ask for all of it again."""
        gather.attempts += 1
        gather.left, gather.sealing = gather.wanted, False
        for index in gather.indices:
            piece = self.request.pieces[index]
            self.status[index] = PENDING
            self.piece_left[index] = piece.num_bytes
            self.requeue.extend(self._cut(index, piece, gather.attempts))

    def give_up(self, index: int, cause: Cause) -> None:
        """The piece, and with it its block, will not come."""
        gather = self.gathers.get(self.request.pieces[index].local_slot)
        for other in gather.indices if gather is not None else [index]:
            if self.status[other] in (PENDING, ARRIVED):
                self.status[other] = MISSING
                self.missing[other] = cause
                self.unsettled -= 1

    def give_up_rest(self, cause: Cause) -> None:
        """No further op is posted. What is in flight may still arrive."""
        self.ending = cause
        self.requeue.clear()
        pieces = self.request.pieces
        flying = {
            p.piece for p in self.in_flight.values() if p.length == pieces[p.piece].block_length
        }
        sealing = {i for gather in self.gathers.values() if gather.sealing for i in gather.indices}
        coming = sealing | flying
        for index in range(len(self.status)):
            if self.status[index] in (PENDING, ARRIVED) and index not in coming:
                self.give_up(index, cause)
        self._piece = len(self.request.pieces)

    def result(self, now: float, detail: str) -> TransferResult:
        """The end, once `done`."""
        assert self.done
        return TransferResult(
            transfer_id=self.request.transfer_id,
            link=self.link,
            state=TransferState.FAILED if self.missing else TransferState.COMPLETED,
            num_pieces=len(self.status),
            num_bytes=self.num_bytes,
            missing=dict(sorted(self.missing.items())),
            timing=self._timing(now),
            num_retries=self.num_retries,
            priority=self.request.priority,
            direction=self.request.direction,
            detail=detail if self.missing else "",
        )

    def _timing(self, now: float) -> Timing:
        ready = self.submitted_at if self.opened_at is None else self.opened_at
        began = now if self.first_post_at is None else self.first_post_at
        if self.first_byte_at is not None:
            began = max(began, self.first_byte_at)
        return Timing(
            queue_wait=max(0.0, began - ready),
            setup=max(0.0, ready - self.submitted_at),
            wire=max(0.0, now - began - self.verify_seconds),
            verify=self.verify_seconds,
        )

    def _settle(self, index: int) -> None:
        assert self.status[index] != DONE, f"piece {index} arrived twice"
        if self.status[index] == MISSING:
            return
        self.status[index] = DONE
        self.num_bytes += self.request.pieces[index].num_bytes
        self.unsettled -= 1

    def _gather(self, index: int, piece: Piece) -> Gather:
        gather = self.gathers.get(piece.local_slot)
        if gather is None:  # a whole block, cut into ops
            size = piece.num_bytes
            gather = Gather([index], size, covers=True, left=size)
            self.gathers[piece.local_slot] = gather
        return gather

    def _advance(self) -> Part | None:
        pieces = self.request.pieces
        while self._piece < len(pieces):
            index, piece = self._piece, pieces[self._piece]
            if self.status[index] != PENDING:
                self._piece, self._offset = index + 1, -1
                continue
            offset = piece.offset if self._offset < 0 else self._offset
            length = self._op_length(piece.end - offset)
            self._offset = offset + length
            if self._offset >= piece.end:
                self._piece, self._offset = index + 1, -1
            return Part(index, offset, length, 0)
        return None

    def _cut(self, index: int, piece: Piece, attempts: int) -> Iterator[Part]:
        offset = piece.offset
        while offset < piece.end:
            length = self._op_length(piece.end - offset)
            yield Part(index, offset, length, attempts)
            offset += length

    def _op_length(self, rest: int) -> int:
        limit = self.request.piece_bytes
        return min(rest, limit) if limit > 0 else rest


def check_request(request: TransferRequest) -> None:
    """ValueError names the first piece that makes no sense, before any byte moves."""
    if not request.pieces:
        raise ValueError(f"transfer {request.transfer_id}: it has no pieces")
    ranges: dict[int, list[tuple[int, int, Piece]]] = {}
    for index, piece in enumerate(request.pieces):
        if not 0 <= piece.offset < piece.end <= piece.block_length or len(piece.key) != KEY_BYTES:
            raise ValueError(f"piece {index}: no range of a block: {piece}")
        if request.direction is Direction.PUSH and not piece.whole:
            raise ValueError(f"piece {index}: only whole blocks can be pushed")
        ranges.setdefault(piece.local_slot, []).append((piece.offset, piece.end, piece))
    for slot, found in ranges.items():
        if len(found) > 1:
            _check_one_block(slot, found)


def _check_one_block(slot: int, found: list[tuple[int, int, Piece]]) -> None:
    found.sort(key=lambda entry: entry[:2])
    first = found[0][2]
    for (_, end, _), (start, _, piece) in pairwise(found):
        if start < end:
            raise ValueError(f"slot {slot}: two pieces overlap at byte {start}")
        if (piece.key, piece.remote_slot, piece.block_length, piece.local_generation) != (
            first.key, first.remote_slot, first.block_length, first.local_generation,
        ):  # fmt: skip
            raise ValueError(f"slot {slot}: its pieces are of different blocks")


def _gathers_of(pieces: tuple[Piece, ...]) -> dict[int, Gather]:
    gathers: dict[int, Gather] = {}
    for index, piece in enumerate(pieces):
        if piece.whole:
            continue
        gather = gathers.setdefault(piece.local_slot, Gather([], 0, covers=False))
        gather.indices.append(index)
        gather.wanted += piece.num_bytes
        gather.covers = gather.wanted == piece.block_length
        gather.left = gather.wanted
    return gathers
