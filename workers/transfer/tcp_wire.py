"""What travels on a transfer connection after its handshake. Little-endian, batched.

    read:   HEAD(kind=1, count)  READ_ENTRY * count                       ->
                          <-  HEAD(kind=1, count)  REPLY_ENTRY * count  payloads in order
    write:  HEAD(kind=2, count)  WRITE_ENTRY * count  payloads in order   ->
                          <-  HEAD(kind=2, count)  REPLY_ENTRY * count

Replies come in the order of requests, entries in the order of the request's. A reply's payload has
`REPLY_ENTRY.length` bytes: the range's, or 0 where the status is not OK. Handshake documents are
framed by their length (4 bytes).
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from workers.core.errors import ProtocolError
from workers.core.transfer_types import Cause
from workers.core.transfer_verify import Wanted

MAGIC: Final = b"PLT1"
READ: Final = 1
WRITE: Final = 2
HEAD: Final = Struct("<4sBxHQ")  # magic, kind, entries, bytes of payload behind the entries
READ_ENTRY: Final = Struct("<QIIQQQQ16s")  # op, slot, flags, generation, block, offset, length, key
WRITE_ENTRY: Final = Struct("<QIIQQQQ16sQ")  # ... and the block's checksum
REPLY_ENTRY: Final = Struct("<QIIQQQ")  # op, status, 0, length, block's checksum, range's checksum
FRAME: Final = Struct("<I")
MAX_ENTRIES: Final = 256
"""Of one batch: an iovec holds 1024 buffers, and one batch is served at a time."""

FLAG_RANGE: Final = 1
"""The op is no whole block: verify the block and send the range's own checksum."""

STATUS: Final[dict[Cause | None, int]] = {
    None: 0, Cause.STALE: 1, Cause.BOUNDS: 2, Cause.CORRUPT: 3, Cause.REFUSED: 4,
}  # fmt: skip
CAUSES: Final = {number: cause for cause, number in STATUS.items()}


class Ask(NamedTuple):
    """One entry of a request."""

    op_id: int
    flags: int
    wanted: Wanted
    checksum: int  # of the block, in a write


class Answer(NamedTuple):
    """One entry of a reply."""

    op_id: int
    cause: Cause | None
    length: int
    checksum: int
    range_checksum: int


def pack_head(kind: int, count: int, payload_bytes: int = 0) -> bytes:
    return HEAD.pack(MAGIC, kind, count, payload_bytes)


def unpack_head(data: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """Kind, entries, bytes of payload. ProtocolError: that is none."""
    magic, kind, count, payload_bytes = HEAD.unpack_from(data)
    if magic != MAGIC or kind not in (READ, WRITE) or not 0 < count <= MAX_ENTRIES:
        raise ProtocolError(f"no batch of ours: magic {magic!r}, kind {kind}, {count} entries")
    return kind, count, payload_bytes


def unpack_asks(kind: int, data: bytes | bytearray | memoryview) -> list[Ask]:
    if kind == READ:
        return [
            Ask(op_id, flags, Wanted(slot, generation, key, block, offset, length), 0)
            for op_id, slot, flags, generation, block, offset, length, key in (
                READ_ENTRY.iter_unpack(data)
            )
        ]
    return [
        Ask(op_id, flags, Wanted(slot, generation, key, block, offset, length), checksum)
        for op_id, slot, flags, generation, block, offset, length, key, checksum in (
            WRITE_ENTRY.iter_unpack(data)
        )
    ]


def unpack_answers(data: bytes | bytearray | memoryview) -> list[Answer]:
    """ProtocolError: a status that does not exist."""
    try:
        return [
            Answer(op_id, CAUSES[status], length, checksum, range_checksum)
            for op_id, status, _, length, checksum, range_checksum in REPLY_ENTRY.iter_unpack(data)
        ]
    except KeyError as error:
        raise ProtocolError(f"status {error} in a reply") from None
