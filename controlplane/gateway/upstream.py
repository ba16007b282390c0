"""The engine side: pooled HTTP/1.1 connections to one worker.

UpstreamError       the worker did not answer as it must; `kind` says how
    connect         refused, unreachable, or no connection in time
    reset           the connection ended before the reply did
    timeout         no head, or no next piece, in time
    protocol        no HTTP
    too_large       a whole reply over the bound
    hung            it took the connection, but answers nothing, not even a probe
"""

import asyncio
from collections.abc import Callable
from ssl import SSLContext, create_default_context
from time import monotonic
from typing import Literal, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from workers.core.errors import PeriluneError

MAX_IDLE = 64
"""Idle connections that are kept, a worker."""
MAX_HEADS = 256
"""Heads of replies that are remembered, a worker."""
TICK_SECONDS = 0.1
"""How exactly the bounds of waits are kept."""
_BUFFER_BYTES = 256 * 1024
"""Body bytes taken in before a reader is attached; then reading pauses."""

Kind = Literal["connect", "reset", "timeout", "protocol", "too_large", "hung"]


class UpstreamError(PeriluneError):
    """See the module's head. `was_sent`: the worker may have got the request."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.was_sent = kind != "connect"


class Reply:
    """A reply as it arrives. Either `whole()` or `relay()` reads the body; `abort()` gives up."""

    __slots__ = (
        "_buffered", "_connection", "_error", "_full", "_held", "_paused", "_pieces", "_sink",
        "_waiter", "_waiting_for", "complete", "deadline", "head_complete", "headers",
        "last_byte_at", "patience", "status", "waiting_since",
    )  # fmt: skip

    patience: float
    """Seconds that the present wait may last; like `waiting_since` and `deadline` of a wait only."""
    waiting_since: float
    deadline: float

    def __init__(self, connection: "_Connection") -> None:
        self._connection = connection
        self.headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self.status = self._buffered = 0
        self.last_byte_at = 0.0
        self.head_complete = self.complete = self._held = self._full = self._paused = False
        self._sink: Callable[[bytes], None] | None = None
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def whole(self, limit: int, first_seconds: float, idle_seconds: float) -> bytes:
        """The whole body. Bounds: `limit` bytes, seconds to the first and to each next piece."""
        while not self.complete:
            if self._buffered > limit:
                self.abort()
                raise UpstreamError("too_large", f"the reply has over {limit} bytes")
            self._full = False
            self._apply_pause()
            await self.wait(idle_seconds if self._pieces else first_seconds, "no next piece")
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def body_if_one_piece(self) -> bytes | None:
        """The usual case of `whole`: nothing is left to wait for."""
        return self._pieces[0] if self.complete and len(self._pieces) == 1 else None

    async def first_piece(self, seconds: float) -> bytes:
        """Body bytes that have come; waits for some. b"" only for an empty body."""
        while not self._pieces and not self.complete:
            await self.wait(seconds, "no first byte")
        pieces, self._pieces, self._buffered = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def relay(
        self,
        sink: Callable[[bytes], None],
        idle_seconds: float,
        splice: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Give every further piece to `sink`, until the reply is complete.

        Time during which the reader itself has paused does not count as idle. `splice` is offered
        each packet that begins with a chunk; it takes it (True, and sets `last_byte_at`) only if
        the packet is exactly one HTTP chunk, which then is not parsed.
        """
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            sink(b"".join(pieces))
        self._sink = sink
        self._full = False
        self._apply_pause()
        if not self.complete:
            self._connection.splice_by(splice)
            await self.wait(idle_seconds, "no next piece")

    def pause(self) -> None:
        """Backpressure: stop reading from the worker."""
        self._held = True
        self._apply_pause()

    def resume(self) -> None:
        self._held = False
        self._apply_pause()

    def _apply_pause(self) -> None:
        """Read unless the reader has paused or the buffer is full."""
        wanted = self._held or self._full
        if self.complete or wanted == self._paused:
            return
        self._paused = wanted
        if wanted:
            self._connection.pause_reading()
        else:
            self.last_byte_at = monotonic()
            self._connection.resume_reading()

    def abort(self) -> None:
        """Give up; the worker sees its client leave. Idempotent, nothing after completion."""
        if not self.complete:
            self._connection.abort()

    # --- called by the connection ---

    def take(self, pieces: list[bytes]) -> None:
        """A packet's part of the body, which may be none, and the news that the packet is."""
        sink = self._sink
        if pieces:
            self.last_byte_at = monotonic()
            if sink is not None:
                sink(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            else:
                self._pieces += pieces
                if not self.complete:
                    self._buffered += sum(map(len, pieces))
                    if self._buffered > _BUFFER_BYTES:
                        self._full = True
                        self._apply_pause()
        waiter = self._waiter
        if waiter is not None and (sink is None or self.complete) and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: UpstreamError) -> None:
        if self.complete or self._error is not None:
            return
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    # --- waiting ---

    async def wait(self, seconds: float, what: str) -> None:
        """For whatever comes next: parts of the head, or of the body. Raises `UpstreamError`; then
        the reply is aborted."""
        if self._error is not None:
            raise self._error
        connection = self._connection
        waiter = self._waiter = connection.loop.create_future()
        self._waiting_for, self.patience = what, seconds
        now = self.waiting_since = monotonic()
        self.deadline = now + seconds
        pool = connection.pool
        pool.waiting.add(self)
        if not pool.is_ticking:
            pool.start_ticking()
        try:
            await waiter
        except BaseException:
            self.abort()
            raise
        finally:
            pool.waiting.discard(self)
            self._waiter = None

    def check_time(self, now: float) -> None:
        """Fail the wait when it has lasted too long; while relaying, since the last byte."""
        if now < self.deadline or self._paused:
            return
        if self._sink is not None:
            self.deadline = self.last_byte_at + self.patience
        if now >= self.deadline:
            text = f"{self._waiting_for} within {self.patience:g} s"
            self.fail(UpstreamError("timeout", text))


class _Head(msgspec.Struct, frozen=True):
    """Of a reply that came whole in one packet: the same bytes again mean the same."""

    status: int
    headers: dict[bytes, bytes]
    body_bytes: int


class _Connection(asyncio.Protocol):
    """One connection; at most one exchange at a time."""

    def __init__(self, pool: "Upstream", loop: asyncio.AbstractEventLoop) -> None:
        self.pool = pool
        self.loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._pieces: list[bytes] = []
        self._message_complete = False
        self._keep = self._is_final = False
        self._chunk_done = False
        self._splice: Callable[[bytes], bool] | None = None  # of a relay, as a chunk may begin
        self._wanted_splice: Callable[[bytes], bool] | None = None
        self.idle_since = 0.0
        self.got_bytes = False
        self.is_paused = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes) -> Reply:
        assert self._transport is not None
        self.got_bytes = self._message_complete = False
        reply = self._reply = Reply(self)
        self._transport.write(request)
        return reply

    def splice_by(self, splice: Callable[[bytes], bool] | None) -> None:
        """Offer packets to `splice` from the next chunk on, until the reply is complete."""
        self._wanted_splice = splice
        if self._chunk_done:
            self._splice = splice

    def pause_reading(self) -> None:
        self.is_paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self.is_paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.pool.lost(self)
        reply, self._reply = self._reply, None
        if reply is None:
            return
        if exc is None and reply.head_complete and _ends_with_close(reply.headers):
            reply.complete = True
            reply.take([])
            return
        cause = f" ({exc})" if exc is not None else ""
        reply.fail(UpstreamError("reset", f"the connection ended before the reply did{cause}"))

    def data_received(self, data: bytes) -> None:
        splice = self._splice
        if splice is not None and splice(data):
            return  # the parser need not have seen it: it stays between two chunks
        reply = self._reply
        if reply is None:  # bytes that nobody asked for
            self.abort()
            return
        is_first, self.got_bytes = not self.got_bytes, True
        if is_first and self._is_known(reply, data):
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            reply.fail(UpstreamError("protocol", f"no HTTP reply: {error}"))
            self.abort()
            return
        is_complete = self._message_complete
        if is_complete:
            # Before the last piece, so that its receiver sees a reply that is complete.
            self._reply = self._splice = self._wanted_splice = None
            reply.complete, self._chunk_done = True, False
        elif self._wanted_splice is not None or self._chunk_done:
            self._chunk_done = self._chunk_done and data.endswith(b"\r\n")
            self._splice = self._wanted_splice if self._chunk_done else None
        pieces = self._pieces
        if pieces:
            self._pieces = []
        reply.take(pieces)
        if is_complete:
            if is_first and self._keep:
                self.pool.remember(reply, data)
            self.pool.give_back(self, keep=self._keep)

    def _is_known(self, reply: Reply, data: bytes) -> bool:
        """Whether a reply is complete by a head that the parser has seen before; then it need not
        see it again: it stays between two messages."""
        place = data.find(b"\r\n\r\n") + 4
        known = self.pool.heads.get(data[:place])
        if known is None or len(data) - place != known.body_bytes:
            return False
        self._reply = None
        reply.status, reply.headers = known.status, known.headers
        reply.head_complete = reply.complete = True
        reply.take([data[place:]])
        self.pool.give_back(self, keep=True)
        return True

    # --- parser ---

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reply is not None:
            self._reply.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status, reply = self._parser.get_status_code(), self._reply
        self._is_final = status >= 200
        if reply is not None and self._is_final:
            reply.status, reply.head_complete = status, True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_chunk_header(self) -> None:
        self._chunk_done = False

    def on_chunk_complete(self) -> None:
        self._chunk_done = True

    def on_message_complete(self) -> None:
        if self._is_final:
            self._message_complete = True
            self._keep = self._parser.should_keep_alive()  # the parser forgets it after this


def check_url(url: str) -> None:
    """Raises ValueError for what `Upstream` cannot call."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("is no http address")


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
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._closed = False
        self.waiting: set[Reply] = set()  # replies whose waits are bounded by one timer for all
        self.is_ticking = False
        self.heads: dict[bytes, _Head] = {}

    @property
    def num_connections(self) -> int:
        return len(self._all)

    async def send(self, request: bytes, *, head_seconds: float) -> Reply:
        """Send one request; returns when the reply's head is there. Raises `UpstreamError`.

        A kept connection that the worker had closed meanwhile is replaced once: nothing of the
        request was answered.
        """
        kept = self._take_idle()
        if kept is not None:
            reply = kept.send(request)
            try:
                while not reply.head_complete:
                    await reply.wait(head_seconds, "no answer")
            except UpstreamError as error:
                if error.kind != "reset" or kept.got_bytes:
                    raise
            else:
                return reply
        try:
            connection = await self._connect()
        except UpstreamError as error:
            error.was_sent = kept is not None  # it may have died of that request
            raise
        reply = connection.send(request)
        while not reply.head_complete:
            await reply.wait(head_seconds, "no answer")
        return reply

    def close(self) -> None:
        """Cut everything. Idempotent."""
        self._closed = True
        for connection in list(self._all):
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
        if not body or reply.headers.get(b"content-length") != b"%d" % len(body):
            return
        if len(self.heads) >= MAX_HEADS:
            self.heads.clear()
        self.heads[head + b"\r\n\r\n"] = _Head(reply.status, reply.headers, len(body))

    def give_back(self, connection: _Connection, *, keep: bool) -> None:
        if not keep or self._closed or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.idle_since = monotonic()
        if connection.is_paused:
            connection.resume_reading()
        self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
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

    def _take_idle(self) -> _Connection | None:
        oldest = monotonic() - self._keep_alive_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest and connection.is_open:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self, self._loop), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            message = f"no connection to {self.url} within {self._connect_seconds:g} s"
            raise UpstreamError("connect", message) from None
        except OSError as error:
            raise UpstreamError("connect", f"no connection to {self.url}: {error}") from None
        self._all.add(connection)
        return connection


def _ends_with_close(headers: dict[bytes, bytes]) -> bool:
    return b"content-length" not in headers and b"transfer-encoding" not in headers
