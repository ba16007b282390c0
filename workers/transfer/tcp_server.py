"""The side that holds the blocks: serves reads of its slab, and writes into reserved slots.

One thread a connection, blocking, straight between slab and socket. (Measured on loopback: one
`sendmsg` over header and payloads beats `sendfile` by 20 to 50 %, which hands the kernel 4 KiB pages
one by one, and threads beat an event loop, since the kernel's copies release the interpreter.)
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

import msgspec

from workers.core.errors import ProtocolError
from workers.core.messages import Refused
from workers.core.transfer_handshake import (
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    Responder,
)
from workers.core.transfer_types import Cause
from workers.core.transfer_verify import Found, in_bounds, judge_source
from workers.pool.arena import checksum_of
from workers.transfer import tcp_wire as wire
from workers.transfer.base import PushTarget, SlotMemory
from workers.transfer.push import NoSlots
from workers.transfer.tcp_stream import IOV_MAX, tune
from workers.transfer_tls import FIRST_BYTES, is_client_hello, plain_refused

HANDSHAKE_SECONDS: Final = 3
SEND_SECONDS: Final = 10
IDLE_SECONDS: Final = 300
MAX_CONNECTIONS: Final = 1024
"""A peer takes as many as the policy's `parallelism`: 16 at most."""
DEPTH: Final = 1024
MAX_VERIFIED: Final = 4096
_DISCARD_BYTES: Final = 256 * 1024
_log = logging.getLogger(__name__)


class TcpServer:
    """Listens from `__init__` on; `close` ends every connection and thread of it."""

    def __init__(
        self,
        memory: SlotMemory,
        node_id: str,
        secret: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        push: PushTarget | None = None,
        tls: ssl.SSLContext | None = None,
        tls_name: str = "TLS",
        buffer_bytes: int = 0,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.memory = memory
        self.node_id = node_id
        self.push: PushTarget = push or NoSlots()
        self.served_bytes = 0
        self.taken_bytes = 0
        self.refused = 0
        self._secret = secret
        self._tls = tls
        self._tls_name = tls_name
        self._buffer_bytes = buffer_bytes
        self._max_connections = max_connections
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._listener = socket.create_server((host, port), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(
            target=self._accept, name=f"transfer-accept-{node_id}", daemon=True
        )
        self._acceptor.start()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """Threads end within a second: their sockets are shut under them."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(timeout=2)
        with self._lock:
            open_now = list(self._connections.items())
        for sock, _ in open_now:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for _, thread in open_now:
            thread.join(timeout=2)

    def responder(self) -> Responder:
        return Responder(
            self._secret, self.node_id, self.memory.incarnation, self.memory.facts,
            secrets.token_bytes(NONCE_BYTES), depth=DEPTH,
        )  # fmt: skip

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.05)  # out of descriptors, say: others will end
                continue
            with self._lock:
                if self._closing or len(self._connections) >= self._max_connections:
                    self._refuse_more(sock)
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(sock,), name="transfer-serve", daemon=True
                )
                self._connections[sock] = thread
            thread.start()

    def _refuse_more(self, sock: socket.socket) -> None:
        """Said once a hundred times: peers come back at once."""
        if self.refused % 100 == 0:
            _log.warning(
                "transfer_refused code=too_many_connections node=%s: %d are open; lower `parallelism` "
                "in the policy `transfer`", self.node_id, len(self._connections),
            )  # fmt: skip
        self.refused += 1
        sock.close()

    def _serve(self, raw: socket.socket) -> None:
        sock: socket.socket = raw
        try:
            tune(raw, self._buffer_bytes)
            _bound(raw, HANDSHAKE_SECONDS, HANDSHAKE_SECONDS)
            if self._tls is not None:
                if not _speaks_tls(raw):
                    self._refuse_plain(raw)
                    return
                raw.settimeout(HANDSHAKE_SECONDS)  # for all of it: the kernel's are for each call
                sock = self._tls.wrap_socket(raw, server_side=True)
                sock.settimeout(None)
            if _shake_hands(sock, self.responder()):
                _bound(sock, IDLE_SECONDS, SEND_SECONDS)
                _Connection(self, sock).run()
            else:
                self.refused += 1
        except ssl.SSLError as error:
            self.refused += 1
            _log.warning(
                "transfer_refused code=tls node=%s %s: %s", self.node_id, self._tls_name, error
            )
        except (OSError, ProtocolError, EOFError) as error:
            _log.debug("transfer connection ended: %s", error)
        finally:
            with self._lock:
                self._connections.pop(raw, None)
            sock.close()
            raw.close()

    def _refuse_plain(self, sock: socket.socket) -> None:
        """In words that a plain peer reads, once it has said hello."""
        self.refused += 1
        _log.warning("transfer_refused code=tls node=%s: a peer came without TLS", self.node_id)
        refused = Refused("tls", plain_refused(self.node_id, self._tls_name))
        _receive_document(sock, time.monotonic() + HANDSHAKE_SECONDS)
        reply = msgspec.msgpack.encode(refused)
        sock.sendall(wire.FRAME.pack(len(reply)) + reply)


class _Connection:
    """One peer, after the handshake."""

    def __init__(self, server: TcpServer, sock: socket.socket) -> None:
        self._server = server
        self._memory = server.memory
        self._sock = sock
        self._send: Callable[[Sequence[memoryview]], None] = (
            self._send_tls if isinstance(sock, ssl.SSLSocket) else self._send_plain
        )
        self._head = memoryview(bytearray(wire.HEAD.size))
        self._entries = memoryview(bytearray(wire.WRITE_ENTRY.size * wire.MAX_ENTRIES))
        self._verified: dict[int, Found] = {}

    def run(self) -> None:
        """Until the peer leaves (EOFError), or breaks the rules (ProtocolError)."""
        while True:
            _fill(self._sock, self._head)
            kind, count, payload_bytes = wire.unpack_head(self._head)
            size = (wire.READ_ENTRY if kind == wire.READ else wire.WRITE_ENTRY).size
            entries = self._entries[: size * count]
            _fill(self._sock, entries)
            asks = wire.unpack_asks(kind, entries)
            if kind == wire.READ:
                self._answer_reads(asks)
            else:
                self._take_writes(asks, payload_bytes)

    # --- reads ------------------------------------------------------------------------------

    def _answer_reads(self, asks: list[wire.Ask]) -> None:
        entries = bytearray()
        views: list[memoryview] = []
        total = 0
        for ask in asks:
            wanted = ask.wanted
            cause, checksum, range_checksum = self._judge(ask)
            length = 0
            if cause is None:
                length = wanted.length
                views.append(self._memory.range(wanted.slot, wanted.offset, length))
                total += length
            status = wire.STATUS[cause]
            entries += wire.REPLY_ENTRY.pack(ask.op_id, status, 0, length, checksum, range_checksum)
        head = wire.pack_head(wire.READ, len(asks), total) + entries
        self._send([memoryview(head), *views])
        self._server.served_bytes += total

    def _judge(self, ask: wire.Ask) -> tuple[Cause | None, int, int]:
        wanted, memory = ask.wanted, self._memory
        if not in_bounds(wanted, memory.num_slots, memory.payload_bytes):
            return Cause.BOUNDS, 0, 0
        found = memory.found(wanted.slot)
        cause = judge_source(wanted, found)
        if cause is not None or found is None:
            return cause, 0, 0
        if not ask.flags & wire.FLAG_RANGE:
            return None, found.checksum, 0
        if not self._verify_whole(wanted.slot, found):
            return Cause.CORRUPT, 0, 0
        part = checksum_of(memory.range(wanted.slot, wanted.offset, wanted.length))
        if memory.found(wanted.slot) != found:
            return Cause.STALE, 0, 0
        return None, found.checksum, part

    def _verify_whole(self, slot: int, found: Found) -> bool:
        """A range's checksum is worth something only if the block that it is of is right."""
        if self._verified.get(slot) == found:
            return True
        if checksum_of(self._memory.range(slot, 0, found.length)) != found.checksum:
            return False
        if len(self._verified) >= MAX_VERIFIED:
            self._verified.clear()
        self._verified[slot] = found
        return True

    # --- writes -----------------------------------------------------------------------------

    def _take_writes(self, asks: list[wire.Ask], payload_bytes: int) -> None:
        if payload_bytes != sum(ask.wanted.length for ask in asks):
            raise ProtocolError(f"{payload_bytes} bytes announced for writes of another size")
        entries = bytearray()
        _bound(self._sock, SEND_SECONDS, SEND_SECONDS)  # a claimed slot waits for its bytes
        for ask in asks:
            cause = self._take_write(ask)
            entries += wire.REPLY_ENTRY.pack(ask.op_id, wire.STATUS[cause], 0, 0, ask.checksum, 0)
        _bound(self._sock, IDLE_SECONDS, SEND_SECONDS)
        self._send([memoryview(wire.pack_head(wire.WRITE, len(asks)) + entries)])

    def _take_write(self, ask: wire.Ask) -> Cause | None:
        wanted, memory, push = ask.wanted, self._memory, self._server.push
        whole = wanted.offset == 0 and wanted.length == wanted.block_length
        if not whole or not in_bounds(wanted, memory.num_slots, memory.payload_bytes):
            self._discard(wanted.length)
            return Cause.BOUNDS
        if not push.claim(wanted.slot, wanted.generation, wanted.key, wanted.length):
            self._discard(wanted.length)
            return Cause.REFUSED
        landed = False
        try:
            memory.slab.begin_write(wanted.slot)
            view = memory.range(wanted.slot, 0, wanted.length)
            _fill(self._sock, view)
            self._server.taken_bytes += wanted.length
            if checksum_of(view) != ask.checksum:
                return Cause.CORRUPT
            memory.slab.write_header(
                wanted.slot, wanted.generation, wanted.length, ask.checksum, wanted.key
            )
            landed = True
        finally:
            if not landed:
                push.lost(wanted.slot, wanted.generation)
        push.landed(wanted.slot, wanted.generation, ask.checksum)
        return None

    def _discard(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(_DISCARD_BYTES, num_bytes)))
        while num_bytes:
            part = scratch[:num_bytes]
            _fill(self._sock, part)
            num_bytes -= len(part)

    # --- sending ----------------------------------------------------------------------------

    def _send_plain(self, views: Sequence[memoryview]) -> None:
        waiting = list(views)
        at = 0
        while at < len(waiting):
            sent = self._sock.sendmsg(waiting[at : at + IOV_MAX])
            while sent and sent >= len(waiting[at]):
                sent -= len(waiting[at])
                at += 1
            if sent:
                waiting[at] = waiting[at][sent:]

    def _send_tls(self, views: Sequence[memoryview]) -> None:
        for view in views:
            self._sock.sendall(view)


def _shake_hands(sock: socket.socket, responder: Responder) -> bool:
    """False: the peer was refused, and has been told why."""
    until = time.monotonic() + HANDSHAKE_SECONDS
    while not responder.done and responder.refused is None:
        reply = responder.receive(_receive_document(sock, until))
        sock.sendall(wire.FRAME.pack(len(reply)) + reply)
    return responder.done


def _receive_document(sock: socket.socket, until: float) -> bytes:
    """TimeoutError: it is not here by then (and one call's timeout). A peer that sends a byte now and
    then must not keep one of the few connections."""
    head = memoryview(bytearray(wire.FRAME.size))
    _fill(sock, head, until)
    length: int = wire.FRAME.unpack(head)[0]
    if length > MAX_HANDSHAKE_BYTES:
        raise ProtocolError(f"handshake of {length} bytes")
    document = bytearray(length)
    _fill(sock, memoryview(document), until)
    return bytes(document)


def _speaks_tls(sock: socket.socket) -> bool:
    """By the first bytes, which stay to be read."""
    return is_client_hello(sock.recv(FIRST_BYTES, socket.MSG_PEEK | socket.MSG_WAITALL))


def _fill(sock: socket.socket, view: memoryview, until: float = inf) -> None:
    """EOFError: the peer left. OSError: it broke, or was silent for too long."""
    got = sock.recv_into(view, len(view), _wait_all(sock))
    while got < len(view):
        if not got:
            raise EOFError("the peer left")
        if time.monotonic() >= until:
            raise TimeoutError("the peer took too long")
        more = sock.recv_into(view[got:], len(view) - got, _wait_all(sock))
        if not more:
            raise EOFError("the peer left")
        got += more


def _wait_all(sock: socket.socket) -> int:
    return 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL


def _bound(sock: socket.socket, receive_seconds: int, send_seconds: int) -> None:
    """Kernel timeouts: Python's own make each call two."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", receive_seconds, 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_seconds, 0))
