"""The agent's TCP port under TLS: who comes without it is told so, instead of hearing nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from workers.core.framing import encode_reply
from workers.core.messages import Refused
from workers.transfer_tls import FIRST_BYTES, is_client_hello

FIRST_BYTE_SECONDS: Final = 5.0
HANDSHAKE_SECONDS: Final = 5.0
MAX_WAITING: Final = 256
"""Connections that have said nothing yet."""
_log = logging.getLogger(__name__)


class TlsListener:
    """Listens from `start` to `close`. `refusal` is what plain connections are told."""

    def __init__(
        self, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext, refusal: str
    ) -> None:
        self._make = make
        self._context = context
        self._refusal = refusal
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address: tuple[str, int] = ("", 0)

    def start(self, host: str, port: int) -> None:
        """OSError: the address cannot be had."""
        sock = socket.create_server((host, port), backlog=128)
        sock.setblocking(False)
        self._socket, self.address = sock, sock.getsockname()[:2]
        self._add(self._accept(sock))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _add(self, work: object) -> None:
        task = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type, var-annotated]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(0.05)  # out of descriptors, say: others will end
                continue
            if len(self._tasks) > MAX_WAITING:
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._add(self._begin(sock))

    async def _begin(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(FIRST_BYTE_SECONDS):
                under_tls = await _speaks_tls(loop, sock)
            if under_tls:
                await loop.connect_accepted_socket(
                    self._make, sock, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
                )
                return
            _log.warning("client_refused code=tls peer=%s", _name(sock))
            async with asyncio.timeout(FIRST_BYTE_SECONDS):
                await loop.sock_recv(sock, 65_536)
                await loop.sock_sendall(sock, encode_reply(0, Refused("tls", self._refusal)))
        except (OSError, TimeoutError) as error:
            _log.warning(
                "tls_failed peer=%s error=%s", _name(sock), str(error) or "no handshake in time"
            )
        with contextlib.suppress(OSError):
            sock.close()


async def _speaks_tls(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bool:
    """By the first bytes, which stay to be read. OSError: the peer has left."""
    while True:
        try:
            first = sock.recv(FIRST_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            first = None
        if first == b"":
            raise OSError("the peer left")
        if first is not None and (len(first) == FIRST_BYTES or first[0] != 0x16):
            return is_client_hello(first)
        await asyncio.sleep(0.005)


def _name(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return f"{sock.getpeername()[0]}"
    return "unknown"
