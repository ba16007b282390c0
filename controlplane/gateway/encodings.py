"""Content codings: gzip and deflate are undone, so that what is read is read; others keep their
label and their bytes. Sizes are bounded before anything is unpacked whole."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Final

from controlplane.gateway.answers import AnswerError
from controlplane.gateway.client_connection import Request

UNDONE: Final = frozenset((b"gzip", b"x-gzip", b"deflate"))
MAX_PIECE_BYTES: Final = 16 * 1024 * 1024
"""That one packet of a stream may unpack to."""
INLINE_BYTES: Final = 16 * 1024
_ANY_HEAD: Final = 32 + zlib.MAX_WBITS  # gzip or zlib, by its first bytes


class TooLargeError(Exception):
    """It unpacks to more than was allowed."""


def is_undone(encoding: bytes) -> bool:
    return encoding.strip().lower() in UNDONE


def inflate(data: bytes, limit: int) -> bytes:
    """The plain bytes. Raises `ValueError` for what is damaged, `TooLargeError`."""
    parts: list[bytes] = []
    size = 0
    while data:
        unpacker = zlib.decompressobj(_ANY_HEAD)
        try:
            part = unpacker.decompress(data, limit - size + 1)
        except zlib.error as error:
            raise ValueError(f"damaged ({error})") from None
        size += len(part)
        if size > limit:
            raise TooLargeError(f"unpacks to more than {limit} bytes")
        if not unpacker.eof:
            raise ValueError("cut short")
        parts.append(part)
        data = unpacker.unused_data  # gzip may be several members, one after the other
    return b"".join(parts)


def peek(data: bytes) -> bytes:
    """The first plain bytes of what begins so; none of what is damaged."""
    try:
        return zlib.decompressobj(_ANY_HEAD).decompress(data, 64)
    except zlib.error:
        return b""


class Inflater:
    """Between a packed stream and its sink, packet by packet. `on_fault` takes the reason.
    `is_whole`: what has come ends where its compression does."""

    def __init__(self, sink: Callable[[bytes], None], on_fault: Callable[[str], None]) -> None:
        self._sink = sink
        self._on_fault = on_fault
        self._unpacker = zlib.decompressobj(_ANY_HEAD)
        self._broken = False
        self.is_whole = True

    def take(self, data: bytes) -> None:
        if self._broken:
            return
        try:
            plain = self._unpack(data)
        except (zlib.error, TooLargeError) as error:
            self._broken, self.is_whole = True, False
            self._on_fault(f"the stream's compression is damaged: {error}")
            return
        if plain:
            self._sink(plain)

    def _unpack(self, data: bytes) -> bytes:
        plain = b""
        while data:
            plain += self._unpacker.decompress(data, MAX_PIECE_BYTES)
            if self._unpacker.unconsumed_tail or len(plain) > MAX_PIECE_BYTES:
                raise TooLargeError(f"a packet unpacks to more than {MAX_PIECE_BYTES} bytes")
            data = b""
            self.is_whole = self._unpacker.eof
            if self.is_whole:
                data = self._unpacker.unused_data
                self._unpacker = zlib.decompressobj(_ANY_HEAD)
        return plain


async def unpack(request: Request, limit: int) -> None:
    """Undo a request body's coding, off the loop if it is long. Raises `AnswerError`."""
    encoding = request.headers.pop(b"content-encoding")
    if encoding.strip().lower() in (b"", b"identity"):
        return
    if not is_undone(encoding):
        name = encoding.decode("latin-1")
        message = f"content-encoding = {name}: is not understood; send gzip, deflate or none"
        raise AnswerError(415, message, "unknown_encoding")
    try:
        if len(request.body) <= INLINE_BYTES:
            request.body = inflate(request.body, limit)
        else:
            request.body = await asyncio.to_thread(inflate, request.body, limit)
    except TooLargeError as error:
        message = f"the body {error} (max_body_bytes)"
        raise AnswerError(413, message, "body_limit") from None
    except ValueError as error:
        raise AnswerError(400, f"the compressed body is {error}", "malformed_body") from None
