"""The client side: HTTP/1.1 on asyncio Protocols and httptools.

One request of a connection is handled at a time; pipelined ones wait, a few. Reading goes on
meanwhile, so that a client's leaving is noticed at once: it cancels the handler's task.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, Protocol, cast

import httptools
import msgspec
import structlog

from controlplane.gateway.answers import REASONS, AnswerError, StoppingError
from controlplane.gateway.direct import Writer, writer_of
from controlplane.gateway.request_headers import USUAL_CONNECTION, settle
from controlplane.gateway.settings import Limits, Timeouts
from controlplane.gateway.several_lines import Line
from controlplane.gateway.upgrades import head_without_upgrade

log = structlog.get_logger(__name__)

JSON_TYPE = b"application/json"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
MAX_PIECES = 1024  # of a body
LINGER_SECONDS = 2.0


class FlowControl(Protocol):
    """What a relay does while the client reads too slowly."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Request(msgspec.Struct, eq=False):
    """A whole request. `headers` has lower-case names; of several lines of one: `request_headers`."""

    connection: "ClientConnection"
    headers: dict[bytes, bytes]
    method: bytes
    path: bytes
    body: bytes
    keep_alive: bool
    http_1_0: bool
    received_at: float


Handler = Callable[[Request], Coroutine[Any, Any, None]]


class Listener(Protocol):
    """Whom a connection belongs to."""

    loop: asyncio.AbstractEventLoop
    limits: Limits
    handler: Handler
    draining: bool
    is_ending: bool  # the drain has been too short

    def add(self, connection: "ClientConnection") -> bool:
        """False when there are too many."""

    def remove(self, connection: "ClientConnection") -> None: ...

    def request_ended(self) -> None: ...


class ClientConnection(asyncio.Protocol):
    """One client. The handler answers by `respond`, or `start`, `write`..., `finish`."""

    def __init__(self, server: Listener) -> None:
        self._server = server
        self.loop = server.loop
        self._limits = server.limits
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._put: Writer | None = None  # to the transport
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._further: list[Line] = []  # of this head, of names that have come before
        self._head_bytes = self._piece_bytes = self._body_bytes = 0
        self._body: list[bytes] = []
        self._gathered = bytearray()  # of a body that comes in very many pieces, the first ones
        self._in_head = True
        self._message_ended = self._refused = False
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._request: Request | None = None
        self.head_sent = self._is_cancelled = False
        self.relay: FlowControl | None = None
        self.write_paused_since: float | None = None
        self.since = 0.0  # when the state that `sweep` looks at began
        self._reading = False
        self._reading_paused = False  # too many pipelined requests wait
        self._owes_continue = False  # to a request whose head came while another ran

    # --- transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast("asyncio.Transport", transport)
        self._put = writer_of(made)
        self.since = self.loop.time()
        if not self._server.add(self):
            most = self._limits.max_connections
            message = f"{most} clients are connected, the most of this gateway (--max-connections)"
            self._refuse(503, f"{message}; try again, or raise it", "connections", 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._put = None
        self._waiting.clear()
        self._body, self._gathered = [], bytearray()
        del self._parser  # it holds this, and what only the collector finds is found late
        self._server.remove(self)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self.write_paused_since = self.loop.time()
        if self.relay is not None:
            self.relay.pause()

    def resume_writing(self) -> None:
        self.write_paused_since = None
        if self.relay is not None:
            self.relay.resume()
        if self._task is None:
            self._next()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._reading:
            self._reading = True
            self.since = self.loop.time()
        self._message_ended = False
        self._piece_bytes = len(data)
        was_in_head, body_bytes = self._in_head, self._body_bytes
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            if not self._refused:  # a callback's own refusal comes out as a parser's error
                self._refuse(400, f"malformed HTTP: {error}", "malformed_http")
        if not self._message_ended and not self._refused:
            self._bound_fields(was_in_head, self._body_bytes > body_bytes)

    def _bound_fields(self, was_in_head: bool, has_grown: bool) -> None:
        """Of a message that goes on: its head, or its trailer and what else is no body."""
        if self._in_head or not (was_in_head or has_grown):
            self._head_bytes += self._piece_bytes
            if self._head_bytes > self._limits.max_header_bytes:
                self._refuse_head()
        else:
            self._head_bytes = 0

    def _feed(self, data: bytes) -> None:
        """Parse; an offer to upgrade is passed over, as RFC 9110 (7.8) allows."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                if self._refused:
                    return
                rest = rest[upgrade.args[0] :]
                head = head_without_upgrade(self._parser.get_method(), self._url, self._headers)
                self._parser = httptools.HttpRequestParser(self)
                self._parser.feed_data(head)
            else:
                return

    # --- parser callbacks ---

    def on_message_begin(self) -> None:
        self._url, self._headers, self._head_bytes = b"", {}, 0
        self._body, self._body_bytes, self._in_head = [], 0, True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer may say nothing of what a head says, or adds to it
            name, headers = name.lower(), self._headers
            if name not in headers:
                headers[name] = value
            else:
                self._further.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        headers = self._headers
        if self._head_bytes + self._piece_bytes > self._limits.max_header_bytes:
            lines = (*headers.items(), *self._further)
            size = len(self._url) + sum(len(name) + len(value) for name, value in lines)
            if size > self._limits.max_header_bytes:
                self._in_head = True
                self._refuse_head()
                raise _RefusedError
        if (
            self._further
            or headers.get(b"connection", b"close") not in USUAL_CONNECTION
            or b"transfer-encoding" in headers
        ):
            self._settle_head()
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._limits.max_body_bytes:
            self._refuse_body(int(length))
            raise _RefusedError
        if self._parser.get_method() == b"CONNECT":
            self._refuse(405, "CONNECT: this is no proxy", "method_not_allowed")
            raise _RefusedError
        expect = headers.get(b"expect")
        if expect is None or self._transport is None or self._parser.should_upgrade():
            return
        if expect.strip().lower() != b"100-continue":
            self._refuse(417, f"expect = {expect.decode('latin-1')}: cannot be met", "expect")
            raise _RefusedError
        if self._task is None:
            self._write(_CONTINUE)
        else:
            self._owes_continue = True

    def _settle_head(self) -> None:
        is_1_0 = self._parser.get_http_version() == "1.0"
        try:
            settle(self._headers, self._further, http_1_0=is_1_0)
        except AnswerError as error:
            self._refuse(error.status, error.message, error.code)
            raise _RefusedError from None
        self._further.clear()

    def on_body(self, body: bytes) -> None:
        self._owes_continue = False
        self._body.append(body)
        if len(self._body) > MAX_PIECES:  # each has a head of its own in memory
            self._gathered += b"".join(self._body)
            self._body = []
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            self._refuse_body(self._body_bytes)
            raise _RefusedError

    def _whole_body(self) -> bytes:
        body = self._body
        if self._gathered:
            body, self._gathered = [b"".join((self._gathered, *body))], bytearray()
        return body[0] if len(body) == 1 else b"".join(body)

    def on_message_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            return  # `_feed` gives its head again, without the offer
        request = Request(
            self,
            self._headers,
            parser.get_method(),
            self._url,
            self._whole_body(),
            parser.should_keep_alive() and not self._server.draining,
            parser.get_http_version() == "1.0",
            monotonic(),
        )
        self._reading, self._in_head, self._head_bytes = False, True, 0
        self._headers, self._body = {}, []
        self._message_ended = True
        self._waiting.append(request)
        if len(self._waiting) > self._limits.max_pipelined and self._transport is not None:
            self._transport.pause_reading()
            self._reading_paused = True
        if self._task is None:
            self._next()

    # --- answering ---

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    @property
    def is_lingering(self) -> bool:
        """Refused, and open for a moment so that the client can read why."""
        return self._refused and self._task is None

    @property
    def is_arriving(self) -> bool:
        """A part of a request has come (of one that came behind another, some header)."""
        return self._reading or bool(self._headers)

    def respond(
        self, status: int, body: bytes, content_type: bytes = JSON_TYPE, headers: bytes = b""
    ) -> None:
        """The whole answer in one write. `headers` are complete lines."""
        head = self._head(status, content_type, headers)
        length = len(body)
        if self._request is not None and self._request.method == b"HEAD":
            body = b""
        self._write(b"%bcontent-length: %d\r\n\r\n%b" % (head, length, body))

    def start(self, status: int, content_type: bytes, headers: bytes = b"") -> bytes:
        """Head of a chunked answer, to be written with its first piece."""
        head = self._head(status, content_type, headers)
        if self._request is not None and self._request.http_1_0:
            self._must_close()
            return head + b"\r\n"
        return head + b"transfer-encoding: chunked\r\n\r\n"

    def withdraw(self) -> None:
        """The head that `start` gave was not written: the request may have another answer."""
        self.head_sent, self.relay = False, None

    def write(self, data: bytes, head: bytes = b"") -> None:
        """One piece of a chunked answer."""
        if self._request is not None and self._request.http_1_0:
            self._write(head + data)
        else:
            self._write(b"%b%x\r\n%b\r\n" % (head, len(data), data))

    def raw_writer(self) -> Callable[[bytes], object]:
        """Writes pieces that are framed as chunks already. Once the client has left it does nothing,
        or raises RuntimeError: a broken transport is closed a moment before `connection_lost`."""
        return self._write if self._put is None else self._put

    @property
    def takes_chunks(self) -> bool:
        return self._request is not None and not self._request.http_1_0

    def finish(self, data: bytes = b"", head: bytes = b"") -> None:
        """The last piece, which may be empty."""
        if self._request is not None and self._request.http_1_0:
            self._write(head + data)
        elif data:
            self._write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(data), data))
        else:
            self._write(head + b"0\r\n\r\n")

    def close_after(self) -> None:
        """No further request on this connection."""
        self._must_close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _head(self, status: int, content_type: bytes, headers: bytes) -> bytes:
        self.head_sent = True
        if self._request is not None and not self._request.keep_alive:
            headers += b"connection: close\r\n"
        reason = REASONS.get(status, "Status").encode()
        return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\n%b" % (status, reason, content_type, headers)

    def _write(self, data: bytes) -> None:
        put, transport = self._put, self._transport
        if put is not None and transport is not None and not transport.is_closing():
            put(data)

    def _must_close(self) -> None:
        if self._request is not None:
            self._request.keep_alive = False

    # --- one request after the other ---

    def _next(self) -> None:
        transport = self._transport
        if not self._waiting or transport is None or self._refused or transport.is_closing():
            return
        if self.write_paused_since is not None:
            return  # the client does not read its answers; `resume_writing` goes on
        self._request = self._waiting.popleft()
        if self._reading_paused and len(self._waiting) <= self._limits.max_pipelined:
            self._reading_paused = False
            transport.resume_reading()
        self.head_sent = self._is_cancelled = False
        self._task = self.loop.create_task(self._handle(self._request))

    async def _handle(self, request: Request) -> None:
        try:
            await self._server.handler(request)
        except AnswerError as error:
            self._answer_error(error)
        except asyncio.CancelledError:
            if self._server.is_ending and self.is_open:
                self._answer_error(StoppingError())
            raise
        except Exception:
            log.exception("request_failed", path=request.path.decode("latin-1"))
            self._answer_error(AnswerError(500, "the gateway failed; see its log", "internal"))
        finally:
            self._task = None
            self._done(request)
            self._server.request_ended()

    def _answer_error(self, error: AnswerError) -> None:
        if self.head_sent:  # too late for a status: cut, never a silent clean end
            self.abort()
        else:
            self.respond(error.status, error.body(), headers=error.headers())

    def _done(self, request: Request) -> None:
        self.since = self.loop.time()
        self.relay = self._request = None
        if self._transport is None:
            return
        if not request.keep_alive:
            self._transport.close()
            return
        self._next()
        if self._owes_continue and self._task is None:
            self._owes_continue = False
            self._write(_CONTINUE)

    # --- refusing ---

    def _refuse(self, status: int, message: str, code: str, retry_after: int | None = None) -> None:
        """Answer what cannot be handled and close."""
        self._refused = True
        log.info("request_refused", status=status, reason=message)
        if self._transport is None:
            return
        if self._task is None:
            error = AnswerError(status, message, code, retry_after=retry_after)
            headers = error.headers() + b"connection: close\r\n"
            self._request = None
            self.respond(status, error.body(), headers=headers)
            self._linger()
        else:
            self._must_close()

    def _linger(self) -> None:
        """Close without a reset that would take the answer from a client still sending."""
        assert self._transport is not None
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.abort)

    def _refuse_head(self) -> None:
        what, limit = "head" if self._in_head else "trailer", self._limits.max_header_bytes
        self._refuse(431, f"the request's {what} is over the limit of {limit} bytes", "head_limit")

    def _refuse_body(self, size: int) -> None:
        limit = self._limits.max_body_bytes
        message = f"the body has {size} bytes or more, the limit is {limit} (max_body_bytes)"
        self._refuse(413, message, "body_limit")

    def sweep(self, now: float, timeouts: Timeouts) -> None:
        """Called each second: end what has outlived its bound."""
        if self.write_paused_since is not None:
            if now - self.write_paused_since > timeouts.client_stall:
                self.abort()
        elif self._task is not None:
            return
        elif self._reading and now - self.since > timeouts.client_read:
            limit = f"{timeouts.client_read:g} s"
            self._refuse(408, f"the request did not arrive within {limit}", "client_read")
        elif now - self.since > timeouts.client_idle and self._transport is not None:
            self._transport.close()

    def drain(self) -> None:
        """No further request; an idle connection closes now, one with half a request is told why."""
        self._must_close()
        if self._task is not None or self._transport is None or self._refused:
            return
        if self.is_arriving:
            error = StoppingError()
            self._refuse(error.status, error.message, error.code, error.retry_after)
        else:
            self._transport.close()

    def cancel(self) -> None:
        """End the running handler, once. Also where a wait of its own has just ended: the task is
        being cancelled then too, by that wait, which would take it for its own end alone."""
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()


class _RefusedError(Exception):
    """Stops the parser; the answer has been written."""
