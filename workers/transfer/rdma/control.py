"""Small messages between the ends of a queue pair: what one-sided access cannot say.

A request has a kind and entries (those of the tcp transport), its reply the same kind and one
`REPLY_ENTRY` for each. Messages go inline where they fit. No more requests are unanswered than the
other side has receives posted, so that it is never found not ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

from workers.core.errors import ProtocolError
from workers.transfer.rdma.port import Scratch
from workers.transfer.rdma.queue_pair import RECEIVE_IDS, Done, QueuePair
from workers.transfer.rdma.send_queue import INLINE, OP_SEND, Buffer, SendQueue
from workers.transfer.rdma.verbs import close_once

MAGIC: Final = b"PLR1"
HEAD: Final = Struct("<4sBxH")
OP_ID: Final = Struct("<Q")
MESSAGE_BYTES: Final = 4096
SLOTS: Final = 32
"""Messages in flight each way."""

SUM: Final = 1  # READ_ENTRY: verify the block, answer with the range's checksum
CLAIM: Final = 2  # WRITE_ENTRY: may this block be written there?
COMMIT: Final = 3  # OP_ID: its bytes are there; verify, write the header
ABANDON: Final = 4  # OP_ID: they will not come
KINDS: Final = (SUM, CLAIM, COMMIT, ABANDON)
MAX_ENTRIES: Final = (MESSAGE_BYTES - HEAD.size) // 72


class Sent(NamedTuple):
    """Token of a message on its way: its buffer, to be used again afterwards."""

    slot: int
    length: int


def pack(kind: int, entries: Sequence[bytes]) -> bytes:
    return HEAD.pack(MAGIC, kind, len(entries)) + b"".join(entries)


def unpack(message: bytes) -> tuple[int, int, bytes]:
    """Kind, entries, the entries' bytes. ProtocolError: that is none."""
    if len(message) < HEAD.size:
        raise ProtocolError(f"a control message of {len(message)} bytes")
    magic, kind, count = HEAD.unpack_from(message)
    if magic != MAGIC or kind not in KINDS or not 0 < count <= MAX_ENTRIES:
        raise ProtocolError(f"no control message: magic {magic!r}, kind {kind}, {count} entries")
    return kind, count, message[HEAD.size :]


class Mailbox:
    """Buffers for messages over one queue pair. `queue` may carry other work as well."""

    def __init__(
        self, pair: QueuePair, queue: SendQueue[Any], scratch: Scratch, lkey: int, offset: int = 0
    ) -> None:
        """Uses `num_bytes()` of `scratch` from `offset` on."""
        self._pair = pair
        self._queue = queue
        self._view = scratch.view
        self._address = scratch.address
        self._offset = offset
        self._lkey = lkey
        self._free = deque(range(SLOTS))
        self._waiting: deque[bytes] = deque()
        self._receives: list[Any] = []
        self._made: list[Any] = []

    @staticmethod
    def num_bytes() -> int:
        return 2 * SLOTS * MESSAGE_BYTES

    def post_receives(self, wr: Any) -> None:
        """Once, before the other side may send. `wr` is pyverbs' module."""
        for index in range(SLOTS):
            at = self._address + self._place(SLOTS + index)
            sge = wr.SGE(at, MESSAGE_BYTES, self._lkey)
            request = wr.RecvWR(wr_id=RECEIVE_IDS + index, num_sge=1, sg=[sge])
            self._made += [sge, request]
            self._receives.append(request)
            self._pair.post_receive(request)

    def put(self, message: bytes) -> None:
        """Send it as soon as there is a buffer: `pump`. Callers bound how many are unanswered."""
        assert len(message) <= MESSAGE_BYTES
        self._waiting.append(message)

    def pump(self) -> None:
        """Put waiting messages into the chain, as far as buffers and the queue allow."""
        while self._waiting and self._free and self._queue.room:
            message = self._waiting.popleft()
            slot = self._free.popleft()
            at = self._place(slot)
            self._view[at : at + len(message)] = message
            self.restage(Sent(slot, len(message)))

    def restage(self, sent: Sent) -> None:
        """A message that the device had not taken."""
        inline = INLINE if sent.length <= self._pair.queues.inline_bytes else 0
        buffer = Buffer(self._address + self._place(sent.slot), sent.length, self._lkey)
        self._queue.stage(sent, OP_SEND, (buffer,), flags=inline)

    def sent(self, token: Sent) -> None:
        self._free.append(token.slot)

    def receive(self, done: Done) -> bytes:
        """The message; its buffer is posted again."""
        index = done.wr_id - RECEIVE_IDS
        at = self._place(SLOTS + index)
        message = bytes(self._view[at : at + done.byte_len])
        self._pair.post_receive(self._receives[index])
        return message

    def close(self) -> None:
        """After its queue pair."""
        self._receives.clear()
        close_once(self._made)

    def _place(self, index: int) -> int:
        return self._offset + index * MESSAGE_BYTES
