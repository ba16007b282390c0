"""The node agent's client for event loops. Import it from `workers.client`."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Literal, TypeVar

from workers.client_base import (
    DEFAULT_TIMEOUT_SECONDS,
    Backoff,
    answer_challenge,
    notice_silence,
    parse_address,
    tls_of,
    unproved,
    with_nonce,
)
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.framing import LENGTH, decode_reply, encode_request, frame_length
from workers.core.gateway_messages import GatewayShare, TellShare
from workers.core.messages import (
    DesiredWorkers,
    Done,
    EventBatch,
    GetStats,
    Hello,
    Hint,
    Holds,
    HoldsReply,
    LegReport,
    Lookup,
    LookupReply,
    Promote,
    Refused,
    Release,
    Renew,
    Reply,
    ReplyBody,
    ReportWorkers,
    RequestBody,
    Snapshot,
    Subscribe,
    Welcome,
    WorkerCommand,
)
from workers.core.stats_messages import PoolStats, WorkerStatus
from workers.core.transfer_messages import Challenge
from workers.transfer_tls import TlsFiles, client_context, tls_failed

R = TypeVar("R", bound=ReplyBody)
StreamMessage = EventBatch | Snapshot | LegReport | GatewayShare
MAX_UNSENT_BYTES = 64 * 1024
"""Of a stream on which nothing more is told until they have gone."""


class AsyncAgentClient:
    """For event loops. `call` shares one connection; `subscribe` has one of its own."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        secret: bytes | None = None,
        tls: TlsFiles | Literal[False] | None = None,
        *,
        shares: bool = False,
        on_refused: Callable[[Refused], None] = lambda _refusal: None,
    ) -> None:
        """`secret` and `tls` are the cluster's, for addresses over TCP; by default the data
        folder's. `tls` False: none. `shares`: the stream brings other gateways' load, too.
        `on_refused` gets what the agent says to a `tell` that it does not pass on."""
        self.address = address
        self._shares = shares
        self._on_refused = on_refused
        self._subscribed_by: int | None = None  # seq of the stream's last Subscribe
        self._secret = secret
        self._tls = tls
        self._hello = hello
        self._timeout = timeout_seconds
        self._lock = asyncio.Lock()
        self._backoff = Backoff()
        self._last_error = ""
        self._calls: _Connection | None = None
        self._stream: _Connection | None = None
        self._resyncing = False
        self.welcome: Welcome | None = None

    @property
    def subscribed(self) -> bool:
        """Whether the event stream is connected now."""
        return self._stream is not None

    async def call(
        self, body: RequestBody, expected: type[R], timeout_seconds: float | None = None
    ) -> R:
        """Send a request and wait for its reply. AgentUnavailableError, RefusedError."""
        reply = await self._answer(body, timeout_seconds)
        if isinstance(reply, Refused):
            raise RefusedError(reply.code, reply.message)
        if not isinstance(reply, expected):
            await self._drop_calls()
            raise ProtocolError(f"{type(reply).__name__} in answer to {type(body).__name__}")
        return reply

    async def _answer(self, body: RequestBody, timeout_seconds: float | None = None) -> ReplyBody:
        """Whatever the agent replies. AgentUnavailableError; RefusedError of a handshake."""
        if self._calls is None and self._backoff.remaining_seconds:
            raise AgentUnavailableError(f"{self.address}: {self._last_error} (waiting to retry)")
        try:
            async with asyncio.timeout(timeout_seconds or self._timeout), self._lock:
                return await self._exchange(body)
        except (OSError, TimeoutError, ProtocolError, asyncio.IncompleteReadError) as error:
            await self._drop_calls()
            self._backoff.failed()
            self._last_error = str(error) or type(error).__name__
            raise AgentUnavailableError(f"{self.address}: {self._last_error}") from error
        except asyncio.CancelledError:
            await self._drop_calls()  # its reply must not meet the next request
            raise

    async def release(self, owner: str, *more: str) -> int:
        """How many pins ended. Of several owners in one message."""
        return (await self.call(Release(owner, list(more)), Done)).count

    async def renew(self, owners: Iterable[str]) -> int:
        return (await self.call(Renew(list(owners)), Done)).count

    async def lookup(
        self, namespace: bytes, block_hashes: Sequence[bytes], request: str = ""
    ) -> LookupReply:
        return await self.call(Lookup(namespace, list(block_hashes), request), LookupReply)

    async def promote(
        self,
        owner: str,
        namespace: bytes,
        block_hashes: Sequence[bytes],
        urgency: Literal["first_token", "batch"] = "first_token",
    ) -> LookupReply:
        """Have the part on SSD brought into memory; look up again until it is held."""
        body = Promote(owner, namespace, list(block_hashes), urgency)
        return await self.call(body, LookupReply)

    async def hint(
        self, namespace: bytes, block_hashes: Sequence[bytes], session: Literal["continue", "over"]
    ) -> int:
        return (await self.call(Hint(namespace, list(block_hashes), session), Done)).count

    async def holds(self, namespace: bytes, block_hashes: Sequence[bytes]) -> HoldsReply:
        """For auditors: which single blocks are readable, and in which tier."""
        return await self.call(Holds(namespace, list(block_hashes)), HoldsReply)

    async def report_workers(self, workers: Iterable[WorkerStatus]) -> list[WorkerCommand]:
        return (await self.call(ReportWorkers(list(workers)), DesiredWorkers)).commands

    async def stats(self) -> PoolStats:
        return await self.call(GetStats(), PoolStats)

    async def subscribe(
        self, position: Callable[[], tuple[int, int]] = lambda: (0, 0)
    ) -> AsyncIterator[StreamMessage]:
        """KV events, snapshots and leg reports, without end: it reconnects by itself.

        At every (re)connection it goes on after `position()`, (incarnation, sequence), and gets
        a snapshot where the agent no longer knows that place; `PrefixIndex.position` fits.
        RefusedError where the agent refuses the handshake. `resync` asks for a snapshot.
        """
        backoff = Backoff()
        while True:
            try:
                async with asyncio.timeout(self._timeout):
                    stream = await _Connection.open(
                        self.address, self._hello, self._secret, self._tls
                    )
            except (OSError, TimeoutError, ProtocolError, asyncio.IncompleteReadError):
                backoff.failed()
                await asyncio.sleep(backoff.remaining_seconds)
                continue
            self._stream, self.welcome, self._resyncing = stream, stream.welcome, False
            try:
                self._subscribed_by = stream.send(Subscribe(*position(), self._shares))
                async for message in self._read_stream(stream):
                    backoff.succeeded()
                    yield message
            except ConnectionResetError:
                pass  # before anything was said
            finally:
                self._stream = None
                await stream.close()
            backoff.failed()
            await asyncio.sleep(backoff.remaining_seconds)

    def resync(self) -> None:
        """Have the stream begin anew with a snapshot; once is enough until that begins.

        No effect while the stream is not connected: it asks `position` when it is again.
        """
        if self._stream is not None and not self._resyncing:
            self._resyncing = True
            with contextlib.suppress(ConnectionResetError):
                self._subscribed_by = self._stream.send(Subscribe(0, 0, self._shares))

    def tell(self, share: TellShare) -> bool:
        """On the stream's connection, to be passed on to other gateways; whether it went out. Its
        answer is not waited for: `on_refused` gets a refusal. Never blocks."""
        stream = self._stream
        if stream is None or stream.num_unsent > MAX_UNSENT_BYTES:
            return False
        with contextlib.suppress(ConnectionResetError):
            stream.send(share)
            return True
        return False

    async def close(self) -> None:
        """Ends calls' connection; a stream ends with its iterator (`aclosing`)."""
        await self._drop_calls()

    async def _read_stream(self, stream: _Connection) -> AsyncIterator[StreamMessage]:
        """Until the connection ends."""
        while True:
            try:
                reply = await stream.receive()
            except (OSError, ProtocolError, asyncio.IncompleteReadError):
                return
            if isinstance(reply.body, Snapshot) and reply.body.first:
                self._resyncing = False
            if isinstance(reply.body, EventBatch | Snapshot | LegReport | GatewayShare):
                yield reply.body
            elif isinstance(reply.body, Refused) and reply.seq != self._subscribed_by:
                self._on_refused(reply.body)

    async def _exchange(self, body: RequestBody) -> ReplyBody:
        if self._calls is not None and self._calls.has_ended:  # nothing of this was said on it
            await self._drop_calls()
        if self._calls is None:
            self._calls = await _Connection.open(self.address, self._hello, self._secret, self._tls)
            self.welcome = self._calls.welcome
            self._backoff.succeeded()
        return await self._calls.exchange(body)

    async def _drop_calls(self) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            await calls.close()


class _Connection:
    """An open connection after its handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._seq = 0
        self.welcome: Welcome | None = None

    @classmethod
    async def open(
        cls,
        address: str,
        hello: Hello,
        secret: bytes | None = None,
        tls: TlsFiles | Literal[False] | None = None,
    ) -> _Connection:
        """RefusedError where the agent says no."""
        kind, target = parse_address(address)
        if kind == "unix":
            reader, writer = await asyncio.open_unix_connection(target)
        else:
            host, _, port = target.rpartition(":")
            files = tls_of(tls)
            context = None if files is None else client_context(files)
            try:
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            except (ssl.SSLError, ConnectionResetError) as error:
                if files is None:
                    raise
                raise RefusedError("tls", tls_failed(address, files, error)) from error
            notice_silence(writer.get_extra_info("socket"))
            hello = with_nonce(hello)
        connection = cls(reader, writer)
        try:
            reply = await connection.exchange(hello)
            if isinstance(reply, Challenge):
                reply = await connection.exchange(answer_challenge(hello, reply, address, secret))
            elif isinstance(reply, Welcome) and secret is not None and kind != "unix":
                reply = unproved(reply, address)
        except ssl.SSLError as error:
            writer.close()
            raise RefusedError("tls", tls_failed(address, tls_of(tls), error)) from error
        except BaseException:
            writer.close()
            raise
        if not isinstance(reply, Welcome):
            writer.close()
            refused = reply if isinstance(reply, Refused) else Refused("protocol", repr(reply))
            raise RefusedError(refused.code, refused.message)
        connection.welcome = reply
        return connection

    @property
    def has_ended(self) -> bool:
        """The other side or the network has ended it, as far as is known."""
        return self._writer.is_closing() or self._reader.at_eof()

    @property
    def num_unsent(self) -> int:
        """Bytes that wait for the network."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, body: RequestBody) -> int:
        """ConnectionResetError where it has ended meanwhile, which uvloop would not call an OSError."""
        if self._writer.is_closing():
            raise ConnectionResetError("the connection has ended")
        self._seq += 1
        self._writer.write(encode_request(self._seq, body))
        return self._seq

    async def receive(self) -> Reply:
        head = await self._reader.readexactly(LENGTH.size)
        return decode_reply(await self._reader.readexactly(frame_length(head)))

    async def exchange(self, body: RequestBody) -> ReplyBody:
        seq = self.send(body)
        await self._writer.drain()
        while True:
            reply = await self.receive()
            if reply.seq == seq or isinstance(reply.body, Refused):
                return reply.body

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
