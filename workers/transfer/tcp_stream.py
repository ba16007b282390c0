"""A TCP connection, plain or under TLS, as lists of buffers to fill and to empty."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final

IOV_MAX: Final = 1024
KEEPALIVE_SECONDS: Final = 5


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """No Nagle, big buffers, and dead peers noticed. 0 leaves buffers to the kernel."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)


class Stream:
    """One end. Non-blocking ends raise BlockingIOError where the kernel has, or takes, nothing."""

    short_is_all = True
    """Buffers that were not filled mean that nothing more is there now."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def recv(self, views: Sequence[memoryview]) -> int:
        """Fill the buffers in order; bytes received, 0 at the peer's end."""
        if len(views) == 1:
            return self.sock.recv_into(views[0])
        return self.sock.recvmsg_into(views)[0]

    def send(self, views: Sequence[memoryview]) -> int:
        """Bytes that the kernel took."""
        if len(views) == 1:
            return self.sock.send(views[0])
        return self.sock.sendmsg(views)

    def secure(self) -> bool:
        """Go on with what precedes data; True once it is done."""
        return True

    def wants_write(self) -> bool:
        """Must wait for room although there may be nothing of ours to send."""
        return False

    def buffered(self) -> bool:
        """There are received bytes that no descriptor tells of."""
        return False

    def close(self) -> None:
        self.sock.close()


class TlsStream(Stream):
    """TLS takes one buffer a call and copies it: for links where secrecy is worth that."""

    short_is_all = False  # a record is 16 KiB at most

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._tls = sock
        self._wants_write = False

    def recv(self, views: Sequence[memoryview]) -> int:
        return self._try(lambda: self._tls.recv_into(views[0]))

    def send(self, views: Sequence[memoryview]) -> int:
        return self._try(lambda: self._tls.send(views[0]))

    def secure(self) -> bool:
        try:
            self._try(self._handshake)
        except BlockingIOError:
            return False
        return True

    def wants_write(self) -> bool:
        return self._wants_write

    def buffered(self) -> bool:
        return self._tls.pending() > 0

    def _handshake(self) -> int:
        self._tls.do_handshake()
        return 0

    def _try(self, call: Callable[[], int]) -> int:
        self._wants_write = False
        try:
            return call()
        except ssl.SSLWantReadError:
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            self._wants_write = True
            raise BlockingIOError from None
        except ssl.SSLZeroReturnError:
            return 0


class Outbox:
    """Buffers that wait for the kernel to take them. Keeps views, copies nothing."""

    def __init__(self) -> None:
        self._views: list[memoryview] = []
        self._head = 0

    def __bool__(self) -> bool:
        return self._head < len(self._views)

    def add(self, view: memoryview) -> None:
        self._views.append(view)

    def flush(self, stream: Stream) -> int:
        """Send until nothing is left, or the kernel takes no more; bytes sent."""
        total = 0
        while self:
            try:
                sent = stream.send(self._views[self._head : self._head + IOV_MAX])
            except BlockingIOError:
                break
            total += sent
            self._drop(sent)
        return total

    def _drop(self, sent: int) -> None:
        views, head = self._views, self._head
        while sent:
            size = len(views[head])
            if sent < size:
                views[head] = views[head][sent:]
                break
            sent -= size
            head += 1
        self._head = head
        if head == len(views):
            views.clear()
            self._head = 0
        elif head > IOV_MAX:
            del views[:head]
            self._head = 0
