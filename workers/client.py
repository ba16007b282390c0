"""Clients of the node agent: `AgentClient` blocks (connector), `AsyncAgentClient` does not
(gateway, supervisor).

An address is `unix:/path`, a bare path, or `tcp:host:port`. Both connect when first used and
again when needed; while the agent is away, calls fail at once for a growing while instead of
each waiting for it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, TypeVar

from workers.client_async import AsyncAgentClient, StreamMessage
from workers.client_base import (
    DEFAULT_TIMEOUT_SECONDS,
    Backoff,
    answer_challenge,
    make_hello,
    parse_address,
    tls_of,
    with_nonce,
)
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.framing import LENGTH, decode_reply, encode_request, frame_length
from workers.core.messages import (
    CompleteStore,
    DesiredWorkers,
    Done,
    GetStats,
    Hello,
    Hint,
    Holds,
    HoldsReply,
    LegReport,
    Lookup,
    LookupReply,
    PinPrefix,
    PreparedLoad,
    PreparedStore,
    PrepareLoad,
    PrepareStore,
    Promote,
    Refused,
    Release,
    Renew,
    Reply,
    ReplyBody,
    ReportCorrupt,
    ReportWorkers,
    RequestBody,
    SlotRef,
    StoredSlot,
    Welcome,
    WorkerCommand,
)
from workers.core.stats_messages import PoolStats, WorkerStatus
from workers.core.transfer_messages import Challenge
from workers.transfer_tls import client_context, tls_failed

__all__ = ["AgentClient", "AsyncAgentClient", "StreamMessage", "make_hello"]

_RECEIVE_BYTES: Final = 1 << 18
_MAX_LATE: Final = 256

R = TypeVar("R", bound=ReplyBody)
OnLate = Callable[[RequestBody, ReplyBody], None]
"""Takes an answer that came after its caller had gone. Runs within a later call, of whatever
thread, and must not call the client."""


class AgentClient:
    """Blocking and thread-safe: one call at a time, each done within its timeout.

    Every method raises AgentUnavailableError (no agent, or none in time: treat as a miss) and
    RefusedError (a no for good: at the handshake, or to this request). After an agent's restart
    `incarnation` differs: attach the slab again, and forget every slot of before.
    """

    def __init__(
        self, address: str, hello: Hello, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> None:
        self.address = address
        self._hello = hello
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._backoff = Backoff()
        self._socket: socket.socket | None = None
        self._welcome: Welcome | None = None
        self._last_error = ""
        self._seq = 0
        self._received = bytearray()
        self._late: dict[int, tuple[RequestBody, OnLate]] = {}

    # --- connection -------------------------------------------------------------------------

    @property
    def welcome(self) -> Welcome | None:
        """The last handshake's answer; None before the first."""
        return self._welcome

    @property
    def incarnation(self) -> int:
        """The agent's at the last handshake; 0 before the first."""
        return 0 if self._welcome is None else self._welcome.incarnation

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def connect(self) -> Welcome:
        """Make sure of a connection; the agent's welcome.

        Only here is a connection that the agent ended noticed and replaced without an error: any
        other call fails once, so that its caller learns that slots and pins of before are gone.
        """
        with self._locked(self._timeout) as deadline:
            if self._socket is not None and _has_ended(self._socket):
                self._drop()
            self._ensure_connected(deadline)
            assert self._welcome is not None
            return self._welcome

    def close(self) -> None:
        """Hang up; the agent releases what this connection was storing and loading."""
        with self._lock:
            self._drop()

    def call(self, body: RequestBody, expected: type[R], timeout_seconds: float | None = None) -> R:
        """Send a request and wait for its reply."""
        return self.call_many([body], expected, timeout_seconds)[0]

    def call_many(
        self, bodies: Sequence[RequestBody], expected: type[R], timeout_seconds: float | None = None
    ) -> list[R]:
        """Several requests in one round trip; their replies in order. For small replies only."""
        with self._locked(timeout_seconds or self._timeout) as deadline:
            self._ensure_connected(deadline)
            first = self._send(bodies, deadline)
            replies = [self._await(first + index, deadline) for index in range(len(bodies))]
        return [
            self._accept(reply, body, expected) for reply, body in zip(replies, bodies, strict=True)
        ]

    def try_many(
        self,
        bodies: Sequence[RequestBody],
        expected: type[R],
        timeout_seconds: float,
        on_late: OnLate,
    ) -> list[R | None]:
        """As `call_many`, but an agent that is slow is only waited for, not given up.

        None stands where there is no such answer yet, or a refusal; answers that come after the
        bound go to `on_late`. An agent that owes too many answers is given up after all.
        """
        found: list[R | None] = [None] * len(bodies)
        with self._locked(timeout_seconds) as deadline:
            self._ensure_connected(deadline)
            first = self._send(bodies, deadline)
            for index in range(len(bodies)):
                try:
                    reply = self._receive_for(first + index, deadline)
                except TimeoutError:
                    self._leave(first, bodies, index, on_late)
                    break
                found[index] = reply if isinstance(reply, expected) else None
        return found

    def _accept(self, reply: ReplyBody, body: RequestBody, expected: type[R]) -> R:
        if isinstance(reply, Refused):
            raise RefusedError(reply.code, reply.message)
        if not isinstance(reply, expected):
            self.close()
            raise ProtocolError(f"{type(reply).__name__} in answer to {type(body).__name__}")
        return reply

    # --- requests ---------------------------------------------------------------------------

    def lookup(
        self, namespace: bytes, block_hashes: Sequence[bytes], request: str = ""
    ) -> LookupReply:
        return self.call(Lookup(namespace, list(block_hashes), request), LookupReply)

    def lookup_many(self, namespace: bytes, chains: Iterable[Sequence[bytes]]) -> list[LookupReply]:
        return self.call_many([Lookup(namespace, list(chain)) for chain in chains], LookupReply)

    def prepare_load(
        self, owner: str, namespace: bytes, block_hashes: Sequence[bytes]
    ) -> list[SlotRef]:
        """Pin the readable prefix; its slots. End it by `release(owner)` when it is read."""
        return self.call(PrepareLoad(owner, namespace, list(block_hashes)), PreparedLoad).slots

    def pin_prefix(self, owner: str, namespace: bytes, block_hashes: Sequence[bytes]) -> int:
        return self.call(PinPrefix(owner, namespace, list(block_hashes)), Done).count

    def prepare_store(
        self,
        owner: str,
        namespace: bytes,
        parent: bytes,
        block_hashes: Sequence[bytes],
        tenant: str = "",
    ) -> PreparedStore:
        body = PrepareStore(owner, namespace, parent, list(block_hashes), tenant)
        return self.call(body, PreparedStore)

    def promote(
        self,
        owner: str,
        namespace: bytes,
        block_hashes: Sequence[bytes],
        urgency: Literal["first_token", "batch"] = "first_token",
    ) -> LookupReply:
        """Have the part on SSD brought into memory; look up again until it is held."""
        return self.call(Promote(owner, namespace, list(block_hashes), urgency), LookupReply)

    def hint(
        self, namespace: bytes, block_hashes: Sequence[bytes], session: Literal["continue", "over"]
    ) -> int:
        return self.call(Hint(namespace, list(block_hashes), session), Done).count

    def holds(self, namespace: bytes, block_hashes: Sequence[bytes]) -> HoldsReply:
        """For auditors: which single blocks are readable, and in which tier."""
        return self.call(Holds(namespace, list(block_hashes)), HoldsReply)

    def complete_store(
        self, owner: str, stored: Iterable[StoredSlot], failed: Iterable[SlotRef] = ()
    ) -> int:
        """How many the agent took; fewer than sent where a lease or an incarnation ended."""
        return self.call(CompleteStore(owner, list(stored), list(failed)), Done).count

    def release(self, owner: str) -> int:
        return self.call(Release(owner), Done).count

    def renew(self, owners: Iterable[str]) -> int:
        return self.call(Renew(list(owners)), Done).count

    def report_corrupt(self, report: ReportCorrupt) -> int:
        return self.call(report, Done).count

    def report_leg(self, report: LegReport) -> None:
        self.call(report, Done)

    def report_workers(self, workers: Iterable[WorkerStatus]) -> list[WorkerCommand]:
        return self.call(ReportWorkers(list(workers)), DesiredWorkers).commands

    def stats(self) -> PoolStats:
        return self.call(GetStats(), PoolStats)

    # --- inside -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self, timeout_seconds: float) -> Iterator[float]:
        """Holds the lock; gives the deadline that waiting for it counts against."""
        deadline = time.monotonic() + timeout_seconds
        if not self._lock.acquire(timeout=timeout_seconds):
            raise AgentUnavailableError(
                f"{self.address}: another call holds the connection for over {timeout_seconds} s"
            )
        try:
            yield deadline
        finally:
            self._lock.release()

    def _ensure_connected(self, deadline: float) -> None:
        if self._socket is not None:
            return
        if self._backoff.remaining_seconds:
            raise AgentUnavailableError(f"{self.address}: {self._last_error} (waiting to retry)")
        try:
            self._socket = _connect(self.address, _remaining(deadline))
        except OSError as error:
            raise self._failed(error) from error
        reply = self._greet(deadline)
        if isinstance(reply, Welcome):
            self._welcome = reply
            self._backoff.succeeded()
            return
        refused = reply if isinstance(reply, Refused) else Refused("protocol", repr(reply))
        self._failed(RefusedError(refused.code, refused.message))
        raise RefusedError(refused.code, refused.message)

    def _greet(self, deadline: float) -> ReplyBody:
        if parse_address(self.address)[0] == "unix":
            return self._exchange(self._hello, deadline)
        hello = with_nonce(self._hello)
        reply = self._exchange(hello, deadline)
        if not isinstance(reply, Challenge):
            return reply
        try:
            proof = answer_challenge(hello, reply, self.address)
        except RefusedError as refused:
            return Refused(refused.code, str(refused))
        return self._exchange(proof, deadline)

    def _exchange(self, body: RequestBody, deadline: float) -> ReplyBody:
        return self._await(self._send([body], deadline), deadline)

    def _send(self, bodies: Sequence[RequestBody], deadline: float) -> int:
        """Send in one write; the sequence number of the first."""
        seconds = deadline - time.monotonic()
        if seconds <= 0:  # it went into waiting for others' calls: the agent is not to blame
            raise AgentUnavailableError(f"{self.address}: no time was left to ask")
        first = self._seq + 1
        frames = [encode_request(first + index, body) for index, body in enumerate(bodies)]
        self._seq += len(frames)
        sock = self._socket
        assert sock is not None
        try:
            sock.settimeout(seconds)
            sock.sendall(frames[0] if len(frames) == 1 else b"".join(frames))
        except OSError as error:
            raise self._failed(error) from error
        return first

    def _await(self, seq: int, deadline: float) -> ReplyBody:
        try:
            return self._receive_for(seq, deadline)
        except TimeoutError as error:
            raise self._failed(error) from error

    def _receive_for(self, seq: int, deadline: float) -> ReplyBody:
        """TimeoutError leaves the connection as it is."""
        sock = self._socket
        assert sock is not None
        try:
            while True:
                reply = self._receive(sock, deadline)
                if reply.seq == seq or (not reply.seq and isinstance(reply.body, Refused)):
                    return reply.body
                if (late := self._late.pop(reply.seq, None)) is not None:
                    body, on_late = late
                    on_late(body, reply.body)
        except TimeoutError:
            raise
        except (OSError, ProtocolError) as error:
            raise self._failed(error) from error

    def _leave(
        self, first: int, bodies: Sequence[RequestBody], answered: int, on_late: OnLate
    ) -> None:
        """Go on without the answers after the first `answered`."""
        if len(self._late) + len(bodies) - answered > _MAX_LATE:
            raise self._failed(TimeoutError("too many answers are late"))
        for index in range(answered, len(bodies)):
            self._late[first + index] = (bodies[index], on_late)

    def _receive(self, sock: socket.socket, deadline: float) -> Reply:
        buffer = self._received
        while True:
            if len(buffer) >= LENGTH.size:
                end = LENGTH.size + frame_length(buffer)
                if len(buffer) >= end:
                    document = bytes(buffer[LENGTH.size : end])
                    del buffer[:end]
                    return decode_reply(document)
            sock.settimeout(_remaining(deadline))
            data = sock.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the agent closed the connection")
            buffer += data

    def _failed(self, error: Exception) -> AgentUnavailableError:
        self._last_error = str(error) or type(error).__name__
        self._drop()
        self._backoff.failed()
        return AgentUnavailableError(f"{self.address}: {self._last_error}")

    def _drop(self) -> None:
        self._received.clear()
        self._late.clear()  # what the agent gave for them, it takes back with the connection
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connect(address: str, timeout_seconds: float) -> socket.socket:
    kind, target = parse_address(address)
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_seconds)
            sock.connect(target)
        except OSError:
            sock.close()
            raise
        return sock
    host, _, port = target.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout_seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    files = tls_of(None)
    if files is not None:
        try:
            return client_context(files).wrap_socket(sock)
        except (ssl.SSLError, ConnectionResetError) as error:
            sock.close()
            raise RefusedError("tls", tls_failed(address, files, error)) from error
    return sock


def _has_ended(sock: socket.socket) -> bool:
    """Whether the peer closed the connection. Between calls nothing else is to be read."""
    sock.settimeout(0)
    try:
        return not sock.recv(1, 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_PEEK)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("no answer in time")
    return remaining
