"""A send queue counted by ourselves, its work requests in memory of our own.

pyverbs makes a work request in 70 us, leaks it, and copies its list of buffers once and for all. So
`struct ibv_send_wr` and `struct ibv_sge` (libibverbs' ABI) are kept in a ring, written in place and
chained; only the head of a chain is copied into the one pyverbs object that `post_send` wants.

Soft-RoCE frees a slot before its completion was read, hardware does not: so slots are counted here.
Of a chain only the last request is signalled, and some in between; its completion stands for all
before it. After an error every request completes by itself.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from struct import Struct
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

WR_BYTES: Final = 128
WR: Final = Struct("<QQQiIIIQI")  # wr_id, next, sg_list, num_sge, opcode, flags, imm, address, rkey
_NEXT: Final = Struct("<Q")
_NEXT_AT: Final = 8
_FLAGS: Final = Struct("<I")
_FLAGS_AT: Final = 32
SGE: Final = Struct("<QII")  # address, length, lkey

OP_WRITE: Final = 0
OP_SEND: Final = 2
OP_READ: Final = 4
SIGNALED: Final = 2
INLINE: Final = 8

CHAIN: Final = 16
"""Work requests that one doorbell and one completion stand for."""
SIGNAL_BYTES: Final = 1 << 20

Token = TypeVar("Token")


class Buffer(NamedTuple):
    """Local memory of a work request."""

    address: int
    length: int
    lkey: int


class Poster(Protocol):
    def post(self, chain: int, count: int) -> int:
        """Hand the device the chain at that address; how many of its requests it took."""
        ...


class SendQueue(Generic[Token]):
    """`stage` requests, `submit` them, `complete` what the device says. Not thread-safe."""

    def __init__(self, slots: int, segments: int, poster: Poster) -> None:
        assert slots >= 2
        self.slots = slots
        self._segments = segments
        self._poster = poster
        self._stride = WR_BYTES + segments * SGE.size
        self._memory = mmap.mmap(-1, slots * self._stride)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._next_id = 1  # of the next request to be staged; ids count up by one
        self._posted_id = 1  # of the next request to be posted
        self._entries: deque[tuple[Token, int]] = deque()  # posted and not completed, and staged
        self._oldest_id = 1
        self._since_signal = 0
        self._bytes_since_signal = 0
        self._last_signalled = True
        self.outstanding_bytes = 0
        self.posts = 0
        self.refusals = 0

    @property
    def room(self) -> int:
        """Requests that may be staged. One slot is kept for `_mark`."""
        return max(0, self.slots - 1 - len(self._entries))

    @property
    def outstanding(self) -> int:
        return len(self._entries)

    @property
    def staged(self) -> int:
        return self._next_id - self._posted_id

    def stage(
        self,
        token: Token,
        opcode: int,
        buffers: tuple[Buffer, ...],
        *,
        remote: int = 0,
        rkey: int = 0,
        flags: int = 0,
    ) -> None:
        """Write the next request of the chain. The caller has looked at `room`."""
        num_buffers = len(buffers)
        assert num_buffers <= self._segments
        size = 0
        for _, length, _ in buffers:
            size += length
        self._since_signal += 1
        self._bytes_since_signal += size
        if self._since_signal >= CHAIN or self._bytes_since_signal >= SIGNAL_BYTES:
            flags |= SIGNALED
            self._since_signal = self._bytes_since_signal = 0
        wr_id, memory, base = self._next_id, self._memory, self._base
        at = (wr_id % self.slots) * self._stride
        if wr_id != self._posted_id:
            previous = self._offset(wr_id - 1)
            _NEXT.pack_into(memory, previous + _NEXT_AT, base + at)
        where = at + WR_BYTES
        WR.pack_into(
            memory, at, wr_id, 0, base + where if num_buffers else 0,
            num_buffers, opcode, flags, 0, remote, rkey,
        )  # fmt: skip
        for buffer in buffers:
            SGE.pack_into(memory, where, *buffer)
            where += SGE.size
        self._entries.append((token, size))
        self.outstanding_bytes += size
        self._next_id += 1

    def submit(self) -> list[Token]:
        """Post what is staged, signalling the last. Tokens of what the device did not take, in
        order: they are not queued, and may be staged again (C15)."""
        count = self.staged
        if not count:
            return []
        self._signal(self._next_id - 1)
        taken = self._post(count)
        left: list[Token] = []
        for _ in range(count - taken):
            token, size = self._entries.pop()
            self.outstanding_bytes -= size
            left.append(token)
        self._next_id = self._posted_id
        if left:
            self.refusals += 1
        return left[::-1]

    def settle(self, token: Token) -> bool:
        """After a post that was cut short: see that its part that went out will be heard of.

        True: nothing is owed any more. `token` is the marker's, whose completion says nothing else.
        """
        if self._last_signalled or not self._entries:
            return True
        if len(self._entries) >= self.slots:
            return False
        self.stage(token, OP_READ, ())
        return not self.submit()

    def complete(self, wr_id: int, *, ok: bool) -> tuple[list[Token], Token | None]:
        """Tokens that are done, and the one that failed: requests before a failed one are done."""
        done: list[Token] = []
        while self._entries and self._oldest_id < wr_id:
            done.append(self._take())
        failed: Token | None = None
        if self._entries and self._oldest_id == wr_id:
            if ok:
                done.append(self._take())
            else:
                failed = self._take()
        return done, failed

    def drop(self) -> list[Token]:
        """The queue pair is gone: what was outstanding."""
        tokens = [token for token, _ in self._entries]
        self._entries.clear()
        self._oldest_id = self._posted_id = self._next_id
        self.outstanding_bytes = 0
        return tokens

    def _take(self) -> Token:
        token, size = self._entries.popleft()
        self._oldest_id += 1
        self.outstanding_bytes -= size
        return token

    def _offset(self, wr_id: int) -> int:
        return (wr_id % self.slots) * self._stride

    def _signal(self, wr_id: int) -> None:
        at = self._offset(wr_id) + _FLAGS_AT
        (flags,) = _FLAGS.unpack_from(self._memory, at)
        _FLAGS.pack_into(self._memory, at, flags | SIGNALED)
        self._since_signal = self._bytes_since_signal = 0

    def _post(self, count: int) -> int:
        self.posts += 1
        taken = self._poster.post(self._base + self._offset(self._posted_id), count)
        assert 0 <= taken <= count
        if taken:
            last = self._offset(self._posted_id + taken - 1) + _FLAGS_AT
            self._last_signalled = bool(_FLAGS.unpack_from(self._memory, last)[0] & SIGNALED)
        self._posted_id += taken
        return taken


class HeadRequest:
    """The pyverbs object that stands for the first request of a chain, written from outside."""

    def __init__(self, sge_class: type, wr_class: type) -> None:
        self._sge = sge_class(0, 0, 0)
        self.object = wr_class(num_sge=1, sg=[self._sge])
        self.address = _address_of_request(self.object)
        self._own_list = WR.unpack(ctypes.string_at(self.address, WR.size))[2]

    def load(self, chain: int) -> None:
        """Take over the request at that address; what it is chained to stays where it is."""
        ctypes.memmove(self.address, chain, WR_BYTES)

    @property
    def wr_id(self) -> int:
        return int(self.object.wr_id)

    def close(self) -> None:
        """Give pyverbs back the list that it will free."""
        empty = WR.pack(0, 0, self._own_list, 1, 0, 0, 0, 0, 0).ljust(WR_BYTES, b"\0")
        ctypes.memmove(self.address, empty, WR_BYTES)
        self.object.close()
        self._sge.close()


def _address_of_request(request: object) -> int:
    """Where `struct ibv_send_wr` lies in a pyverbs object; proved by reading it back."""
    mark = 0x5045_5249_4C55_4E45
    request.wr_id = mark  # type: ignore[attr-defined]
    size = type(request).__basicsize__
    raw = ctypes.string_at(id(request), size)
    places = [
        at for at in range(0, size - WR_BYTES + 1, 8) if _NEXT.unpack_from(raw, at)[0] == mark
    ]
    if len(places) == 1:
        address = id(request) + places[0]
        wanted = (mark + 1, 0, 1, OP_READ, INLINE)
        wr_id, num_sge, opcode, flags = mark + 1, 1, OP_READ, INLINE
        before = WR.unpack(ctypes.string_at(address, WR.size))
        changed = WR.pack(wr_id, 0, before[2], num_sge, opcode, flags, 0, 0, 0)
        ctypes.memmove(address, changed, WR.size)
        seen = (request.wr_id, 0, request.num_sge, request.opcode, request.send_flags)  # type: ignore[attr-defined]
        if seen == wanted:
            return address
    raise OSError("this release of pyverbs lays out its work requests in an unknown way")
