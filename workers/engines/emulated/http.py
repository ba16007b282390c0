"""A small HTTP/1.1 server: one handler task a request, cancelled when its client leaves."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import httptools
import msgspec
import structlog

from workers.listening import stop_listening

log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large",
            500: "Internal Server Error"}  # fmt: skip


class Exchange:
    """One request and the way to answer it; `send` or `start` + `chunk`... + `end`, once."""

    def __init__(self, connection: "Connection", method: str, url: str) -> None:
        self._connection = connection
        self.method = method
        self.path, _, self.query = url.partition("?")
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.chunks_sent = 0
        self.extra_headers: dict[str, str] = {}
        self.answered = False

    def json(self) -> Any:
        """Raises `msgspec.DecodeError` when the body is no JSON."""
        return msgspec.json.decode(bytes(self.body))

    def send(self, status: int, payload: object, content_type: str = "application/json") -> None:
        """The whole answer. `payload` is bytes, or encoded as JSON."""
        body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
        head = self._head(status, content_type) + f"content-length: {len(body)}\r\n\r\n"
        self.answered = True
        self._connection.write(head.encode() + body)

    def start(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Begin a chunked answer with status 200."""
        self.answered = True
        head = self._head(200, content_type) + "transfer-encoding: chunked\r\n\r\n"
        self._connection.write(head.encode())

    async def chunk(self, data: bytes) -> None:
        """One chunk; waits while the client reads slowly."""
        self.chunks_sent += 1
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._connection.writable.wait()

    def end(self) -> None:
        """End of a chunked answer."""
        self._connection.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """Cut the connection as a dying process would."""
        self._connection.abort()

    def _head(self, status: int, content_type: str) -> str:
        lines = [
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}",
            f"content-type: {content_type}",
            "server: perilune-emulated",
            "x-perilune-emulated: true",
            *(f"{name}: {value}" for name, value in self.extra_headers.items()),
        ]
        return "\r\n".join(lines) + "\r\n"


Handler = Callable[[Exchange], Awaitable[None]]


class Connection(asyncio.Protocol):
    """One client connection; requests on it are answered in order."""

    def __init__(
        self, handler: Handler, connections: set["Connection"], is_open: Callable[[], bool]
    ) -> None:
        self._is_open = is_open
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._headers: dict[str, str] = {}
        self._current: Exchange | None = None
        self._waiting: list[Exchange] = []
        self._task: asyncio.Task[None] | None = None
        self.writable = asyncio.Event()

    # --- transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        self.writable.set()
        if not self._is_open():  # it was on its way in while the server stopped
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        self.writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.abort()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- parser ---

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        method = self._parser.get_method().decode()
        self._current = Exchange(self, method, self._url.decode("latin-1"))
        self._current.headers = self._headers

    def on_body(self, body: bytes) -> None:
        assert self._current is not None
        if len(self._current.body) + len(body) > MAX_BODY_BYTES:
            self.abort()
            return
        self._current.body += body

    def on_message_complete(self) -> None:
        assert self._current is not None
        self._waiting.append(self._current)
        self._next()

    def _next(self) -> None:
        if self._task is None and self._waiting and self._transport is not None:
            exchange = self._waiting.pop(0)
            self._task = asyncio.get_running_loop().create_task(self._handle(exchange))

    async def _handle(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        except Exception:
            log.exception("request_failed", path=exchange.path)
            if exchange.answered:
                self.abort()
            else:
                exchange.send(500, {"error": {"message": "see the engine's log", "code": 500}})
        finally:
            self._task = None
            self._next()


class Server:
    """A listening socket of one emulated worker."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._open = False
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; `port` 0 takes a free one (then see `self.port`)."""
        loop = asyncio.get_running_loop()
        self._open = True
        self._server = await loop.create_server(
            lambda: Connection(self._handler, self._connections, lambda: self._open), host, port
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and cut what is connected. Idempotent."""
        if self._server is None:
            return
        self._open = False
        await stop_listening(self._server)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)
        self._server = None

    @property
    def num_connections(self) -> int:
        return len(self._connections)
