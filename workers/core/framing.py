"""Frames of the agent protocol: bytes in, documents out."""

from __future__ import annotations

from struct import Struct
from typing import Final

import msgspec

from workers.core.errors import ProtocolError
from workers.core.messages import MAX_FRAME_BYTES, Reply, ReplyBody, Request, RequestBody

LENGTH: Final = Struct("<I")
_encoder: Final = msgspec.msgpack.Encoder()
_request_decoder: Final = msgspec.msgpack.Decoder(Request)
_reply_decoder: Final = msgspec.msgpack.Decoder(Reply)


def encode_request(seq: int, body: RequestBody) -> bytes:
    """A whole frame. ProtocolError: it is longer than the other side would take."""
    return _frame(_encoder.encode(Request(seq, body)))


def encode_reply(seq: int, body: ReplyBody) -> bytes:
    """A whole frame. ProtocolError: it is longer than the other side would take."""
    return _frame(_encoder.encode(Reply(seq, body)))


def decode_request(document: bytes | bytearray | memoryview) -> Request:
    try:
        return _request_decoder.decode(document)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no request of ours: {error}") from error


def decode_reply(document: bytes | bytearray | memoryview) -> Reply:
    try:
        return _reply_decoder.decode(document)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no reply of ours: {error}") from error


def frame_length(head: bytes | bytearray | memoryview, limit: int = MAX_FRAME_BYTES) -> int:
    """Length of the document behind these 4 bytes. ProtocolError: longer than allowed."""
    length: int = LENGTH.unpack_from(head)[0]
    if length > limit:
        raise ProtocolError(f"frame of {length} bytes: at most {limit} are allowed")
    return length


class FrameBuffer:
    """Cuts a byte stream into documents. Holds at most one unfinished frame, of `limit` bytes."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The documents that `data` completes, in order. ProtocolError as `frame_length`."""
        self._buffer += data
        documents: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= LENGTH.size:
            body = start + LENGTH.size
            end = body + frame_length(memoryview(self._buffer)[start:body], self.limit)
            if end > len(self._buffer):
                break
            documents.append(bytes(memoryview(self._buffer)[body:end]))
            start = end
        if start:
            del self._buffer[:start]
        return documents


def _frame(document: bytes) -> bytes:
    if len(document) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"message of {len(document)} bytes: at most {MAX_FRAME_BYTES} fit into one frame"
        )
    return LENGTH.pack(len(document)) + document
