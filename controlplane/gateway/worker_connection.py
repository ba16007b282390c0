"""One HTTP/1.1 connection to a worker: bytes in, parts of replies out."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import httptools
import msgspec

from controlplane.gateway.direct import Writer, writer_of
from controlplane.gateway.reply import Reply, UpstreamError
from controlplane.gateway.several_lines import Line, join_lines

if TYPE_CHECKING:
    from controlplane.gateway.upstream import Upstream

_READ_HERE = frozenset((b"content-type", b"content-length", b"transfer-encoding", b"location"))
"""Headers of a reply that are acted on: of several lines the last one counts. Codings are not among
them: those of several lines are more than one, which goes on with its labels."""
MAX_FIELD_BYTES = 256 * 1024
"""Of a reply's head or trailer; what has come of it is kept until it ends."""


class KnownHead(msgspec.Struct, frozen=True):
    """Of a reply that came whole in one packet: the same bytes again mean the same."""

    status: int
    headers: dict[bytes, bytes]
    body_bytes: int


class WorkerConnection(asyncio.Protocol):
    """One connection; at most one exchange at a time."""

    def __init__(self, pool: "Upstream", loop: asyncio.AbstractEventLoop) -> None:
        self.pool = pool
        self.loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._write: Writer | None = None
        self._reply: Reply | None = None
        self._pieces: list[bytes] = []
        self._message_complete = self._has_more = False
        self._keep = self._is_final = False
        self._further: list[Line] = []  # of a reply's head, of names that have come before
        self._field_bytes = 0  # in a row that were no body
        self._chunk_done = False
        self._splice: Callable[[bytes], bool] | None = None  # of a relay, as a chunk may begin
        self._wanted_splice: Callable[[bytes], bool] | None = None
        self.idle_since = 0.0
        self.got_bytes = False
        self.is_paused = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, *, wants_piece: bool = False) -> Reply:
        assert self._write is not None
        self.got_bytes = self._message_complete = self._has_more = False
        self._field_bytes = 0
        reply = self._reply = Reply(self, wants_piece=wants_piece)
        self._write(request)
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
        self._transport = made = cast("asyncio.Transport", transport)
        self._write = writer_of(made)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._write = self._splice = self._wanted_splice = None
        del self._parser  # it holds this, and what only the collector finds is found late
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
        if (is_first and self._is_known(reply, data)) or not self._parse(reply, data):
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
            self._pieces, self._field_bytes = [], 0
        elif not self._bound_fields(reply, len(data)):
            return
        reply.take(pieces)
        if is_complete:
            if is_first and self._keep and not self._has_more:
                self.pool.remember(reply, data)
            self.pool.give_back(self, keep=self._keep and not self._has_more)

    def _parse(self, reply: Reply, data: bytes) -> bool:
        """False: given up."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._give_up(reply, _no_reply(error))
            return False
        return True

    def _bound_fields(self, reply: Reply, num_bytes: int) -> bool:
        """Of a packet without body. False: given up."""
        self._field_bytes += num_bytes
        if reply.complete or self._field_bytes <= MAX_FIELD_BYTES:
            return True
        self._give_up(reply, f"a head or trailer of more than {MAX_FIELD_BYTES} bytes")
        return False

    def _give_up(self, reply: Reply, why: str) -> None:
        reply.fail(UpstreamError("protocol", why))
        self.abort()

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
        reply = self._reply
        if reply is None or reply.head_complete:  # a trailer, which nobody asked for
            return
        name, headers = name.lower(), reply.headers
        if name not in headers or name in _READ_HERE:
            headers[name] = value
        else:
            self._further.append((name, value))

    def on_headers_complete(self) -> None:
        if self._message_complete:  # a second reply to one request: nothing of it is the client's
            self._has_more = True
            return
        status, reply = self._parser.get_status_code(), self._reply
        self._is_final = status >= 200
        if reply is None:
            return
        if self._further:
            join_lines(reply.headers, self._further)  # they go on as they came, line by line
            self._further.clear()
        if self._is_final:
            reply.status, reply.head_complete = status, True
        else:
            reply.headers.clear()  # of a 1xx: the reply's own are to come

    def on_body(self, body: bytes) -> None:
        if not self._has_more:
            self._pieces.append(body)

    def on_chunk_header(self) -> None:
        self._chunk_done = False

    def on_chunk_complete(self) -> None:
        self._chunk_done = True

    def on_message_complete(self) -> None:
        if self._is_final and not self._has_more:
            self._message_complete = True
            self._keep = self._parser.should_keep_alive()  # the parser forgets it after this


def _no_reply(error: Exception) -> str:
    if isinstance(error, httptools.HttpParserUpgrade):  # says where, not what
        return "it switched to another protocol, unasked"
    return f"no HTTP reply: {error}"


def _ends_with_close(headers: dict[bytes, bytes]) -> bool:
    return b"content-length" not in headers and b"transfer-encoding" not in headers
