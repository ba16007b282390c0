"""Clients of the node agent: `AgentClient` blocks (connector), `AsyncAgentClient` does not
(gateway, supervisor).

An address is `unix:/path`, a bare path, or `tcp:host:port`. Both connect when first used and
again when needed; while the agent is away, calls fail at once for a growing while instead of
each waiting for it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

from workers.client_async import AsyncAgentClient, StreamMessage
from workers.client_base import DEFAULT_TIMEOUT_SECONDS, Backoff, make_hello, parse_address
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.framing import LENGTH, decode_reply, encode_request, frame_length
from workers.core.messages import (
    CompleteStore,
    DesiredWorkers,
    Done,
    GetStats,
    Hello,
    LegReport,
    Lookup,
    LookupReply,
    PinPrefix,
    PreparedLoad,
    PreparedStore,
    PrepareLoad,
    PrepareStore,
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

__all__ = ["AgentClient", "AsyncAgentClient", "StreamMessage", "make_hello"]

_RECEIVE_BYTES: Final = 1 << 18

R = TypeVar("R", bound=ReplyBody)


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
        with self._locked(timeout_seconds or self._timeout) as deadline:
            self._ensure_connected(deadline)
            reply = self._exchange(body, deadline)
        if isinstance(reply, Refused):
            raise RefusedError(reply.code, reply.message)
        if not isinstance(reply, expected):
            self.close()
            raise ProtocolError(f"{type(reply).__name__} in answer to {type(body).__name__}")
        return reply

    # --- requests ---------------------------------------------------------------------------

    def lookup(self, namespace: bytes, block_hashes: Sequence[bytes]) -> LookupReply:
        return self.call(Lookup(namespace, list(block_hashes)), LookupReply)

    def prepare_load(
        self, owner: str, namespace: bytes, block_hashes: Sequence[bytes]
    ) -> list[SlotRef]:
        """Pin the readable prefix; its slots. End it by `release(owner)` when it is read."""
        return self.call(PrepareLoad(owner, namespace, list(block_hashes)), PreparedLoad).slots

    def pin_prefix(self, owner: str, namespace: bytes, block_hashes: Sequence[bytes]) -> int:
        return self.call(PinPrefix(owner, namespace, list(block_hashes)), Done).count

    def prepare_store(
        self, owner: str, namespace: bytes, parent: bytes, block_hashes: Sequence[bytes]
    ) -> PreparedStore:
        return self.call(PrepareStore(owner, namespace, parent, list(block_hashes)), PreparedStore)

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
        reply = self._exchange(self._hello, deadline)
        if isinstance(reply, Welcome):
            self._welcome = reply
            self._backoff.succeeded()
            return
        refused = reply if isinstance(reply, Refused) else Refused("protocol", repr(reply))
        self._failed(RefusedError(refused.code, refused.message))
        raise RefusedError(refused.code, refused.message)

    def _exchange(self, body: RequestBody, deadline: float) -> ReplyBody:
        self._seq += 1
        frame = encode_request(self._seq, body)
        sock = self._socket
        assert sock is not None
        try:
            sock.settimeout(_remaining(deadline))
            sock.sendall(frame)
            while True:
                reply = self._receive(sock, deadline)
                if reply.seq == self._seq or isinstance(reply.body, Refused):
                    return reply.body
        except (OSError, ProtocolError) as error:
            raise self._failed(error) from error

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
    return sock


def _has_ended(sock: socket.socket) -> bool:
    """Whether the peer closed the connection. Between calls nothing else is to be read."""
    sock.settimeout(0)
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("no answer in time")
    return remaining
