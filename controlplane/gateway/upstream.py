"""The engine side: pooled HTTP/1.1 connections to one worker."""

import asyncio
import re
from ssl import SSLContext, create_default_context
from time import monotonic
from urllib.parse import urlsplit

from controlplane.gateway.reply import Reply, UpstreamError
from controlplane.gateway.worker_connection import KnownHead, WorkerConnection

__all__ = ["Reply", "Upstream", "UpstreamError", "check_url"]

MAX_IDLE = 64
"""Idle connections that are kept, a worker."""
MAX_HEADS = 256
"""Heads of replies that are remembered, a worker."""
MAX_HEAD_BYTES = 4096
"""Of each."""
TICK_SECONDS = 0.1
"""How exactly the bounds of waits are kept."""


def check_url(url: str) -> None:
    """Raises ValueError for what `Upstream` cannot call, or would call otherwise than it says."""
    if not re.fullmatch(r"[!-~]+", url):
        raise ValueError("has blanks or other characters that no address has")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("is no http address")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("has a user, a query or a fragment, which are not sent")


class Upstream:
    """Connections to one base URL (http, or https with the system's trust)."""

    def __init__(self, url: str, connect_seconds: float, keep_alive_seconds: float) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host = parts.hostname or "127.0.0.1"
        self._tls: SSLContext | None = create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self.host_header = parts.netloc.rpartition("@")[2].encode()
        self.base_path = parts.path.rstrip("/").encode()
        self._connect_seconds = connect_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self._loop = asyncio.get_running_loop()
        self._idle: list[WorkerConnection] = []
        self._all: set[WorkerConnection] = set()
        self._closed = False
        self.waiting: set[Reply] = set()  # replies whose waits are bounded by one timer for all
        self.is_ticking = False
        self.heads: dict[bytes, KnownHead] = {}

    @property
    def num_connections(self) -> int:
        return len(self._all)

    def send_now(self, request: bytes, *, wants_piece: bool = False) -> Reply | None:
        """The first half of `send`, which is given what this returns: the worker has the request
        while its sender still keeps its books. None: no connection is kept."""
        kept = self._take_idle()
        return None if kept is None else kept.send(request, wants_piece=wants_piece)

    async def send(
        self,
        request: bytes,
        *,
        head_seconds: float,
        wants_piece: bool = False,
        sent: Reply | None = None,
    ) -> Reply:
        """Send one request; returns when the reply's head is there, or with `wants_piece` the first
        piece of a 200 as well: one wait instead of two. Raises `UpstreamError`.

        A kept connection that the worker had closed meanwhile is replaced once: nothing of the
        request was answered.
        """
        reply = sent if sent is not None else self.send_now(request, wants_piece=wants_piece)
        was_kept = reply is not None
        if reply is not None:
            try:
                while not reply.head_complete:
                    await reply.wait(head_seconds, "no answer")
            except UpstreamError as error:
                if error.kind != "reset" or reply.has_begun:
                    raise
            else:
                return reply
        try:
            connection = await self._connect()
        except UpstreamError as error:
            error.was_sent = was_kept  # it may have died of that request
            raise
        reply = connection.send(request, wants_piece=wants_piece)
        while not reply.head_complete:
            await reply.wait(head_seconds, "no answer")
        return reply

    def close(self) -> None:
        """Cut everything. Idempotent."""
        self._closed = True
        for connection in list(self._all):
            connection.abort()

    def retire(self) -> None:
        """Nothing new goes there: what is under way ends by itself, in its own bounds. Idempotent."""
        self._closed = True
        for connection in list(self._idle):
            connection.abort()

    def is_silent(self, now: float, seconds: float) -> bool:
        """Whether something is waited for, and nothing has come for so long."""
        silent = False
        for reply in self.waiting:
            if now - reply.last_byte_at < seconds:
                return False
            silent |= now - reply.waiting_since >= seconds
        return silent

    def fail_waiting(self, error: UpstreamError) -> int:
        """End all waits; how many."""
        waiting = list(self.waiting)
        for reply in waiting:
            reply.fail(error)
        return len(waiting)

    def remember(self, reply: Reply, data: bytes) -> None:
        """`data` was the whole reply, and another may follow on its connection."""
        head, _, body = data.partition(b"\r\n\r\n")
        if (
            not body
            or len(head) > MAX_HEAD_BYTES
            or reply.headers.get(b"content-length") != b"%d" % len(body)
        ):
            return
        if len(self.heads) >= MAX_HEADS:
            self.heads.clear()
        self.heads[head + b"\r\n\r\n"] = KnownHead(reply.status, reply.headers, len(body))

    def give_back(self, connection: WorkerConnection, *, keep: bool) -> None:
        if not keep or self._closed or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.idle_since = monotonic()
        if connection.is_paused:
            connection.resume_reading()
        self._idle.append(connection)

    def lost(self, connection: WorkerConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def start_ticking(self) -> None:
        """Check who is `waiting`, now and then. A timer a wait would cost more than that."""
        self.is_ticking = True
        self._loop.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now = monotonic()
        for reply in list(self.waiting):
            reply.check_time(now)
        self.is_ticking = bool(self.waiting)
        if self.is_ticking:
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _take_idle(self) -> WorkerConnection | None:
        oldest = monotonic() - self._keep_alive_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest and connection.is_open:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> WorkerConnection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await self._loop.create_connection(
                    lambda: WorkerConnection(self, self._loop),
                    self._host,
                    self._port,
                    ssl=self._tls,
                )
        except TimeoutError:
            message = f"no connection to {self.url} within {self._connect_seconds:g} s"
            raise UpstreamError("connect", message) from None
        except OSError as error:
            raise UpstreamError("connect", f"no connection to {self.url}: {error}") from None
        self._all.add(connection)
        return connection
