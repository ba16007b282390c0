"""Documents over the small TCP connection that a pair of nodes keeps beside its queue pairs."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from workers.core.errors import ProtocolError
from workers.core.transfer_handshake import MAX_HANDSHAKE_BYTES
from workers.transfer.tcp_stream import tune
from workers.transfer.tcp_wire import FRAME

_READ_BYTES: Final = 64 * 1024


class FramedSocket:
    """Non-blocking. Raises OSError, EOFError (the peer left) and ProtocolError."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        tune(sock, 0)
        self._sock = sock
        self._buffer = bytearray()

    @classmethod
    def connecting(cls, host: str, port: int) -> FramedSocket:
        """Start to connect: writable when it is decided, see `connected`."""
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        code = sock.connect_ex(address)
        if code in (0, errno.EINPROGRESS):
            return cls(sock)
        sock.close()
        raise OSError(code, os.strerror(code))

    def fileno(self) -> int:
        return self._sock.fileno()

    def connected(self) -> None:
        """OSError: it is not."""
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def send(self, document: bytes) -> None:
        """Few and small, one at a time: the kernel takes them whole."""
        framed = FRAME.pack(len(document)) + document
        try:
            sent = self._sock.send(framed)
        except BlockingIOError:
            sent = 0
        if sent != len(framed):
            raise ProtocolError("the peer reads nothing: its handshake is stuck")

    def receive(self) -> list[bytes]:
        """Whole documents that are here."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError("the peer closed the connection")
        self._buffer += data
        documents = []
        while (document := self._next()) is not None:
            documents.append(document)
        return documents

    def close(self) -> None:
        self._sock.close()

    def _next(self) -> bytes | None:
        if len(self._buffer) < FRAME.size:
            return None
        length: int = FRAME.unpack_from(self._buffer)[0]
        if length > MAX_HANDSHAKE_BYTES:
            raise ProtocolError(f"a document of {length} bytes")
        end = FRAME.size + length
        if len(self._buffer) < end:
            return None
        document = bytes(self._buffer[FRAME.size : end])
        del self._buffer[:end]
        return document
