"""Blocks over TCP: several connections to a peer, polled by the engine's thread."""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final

from workers.core.errors import ProtocolError, RefusedError
from workers.core.transfer_handshake import NONCE_BYTES, Initiator, StaleIncarnationError
from workers.core.transfer_types import Cause, Op
from workers.transfer import tcp_wire as wire
from workers.transfer.base import (
    DownBy,
    Endpoint,
    OpenedBy,
    PeerAddress,
    Report,
    SlotMemory,
    Transport,
)
from workers.transfer.tcp_lane import Lane, tls_name
from workers.transfer.tcp_stream import Stream, TlsStream, tune
from workers.transfer_tls import tls_failed

BATCH_BYTES: Final = 1 << 20
POLL_BYTES: Final = 4 << 20
"""Of one lane in one poll, so that no peer keeps the others waiting."""


class TcpTransport(Transport):
    """`parallelism`: connections to a peer; may be set anew at any time. `buffer_bytes`: of each socket, 0 lets the kernel grow
    them, which long fat links need."""

    name = "tcp"

    def __init__(
        self,
        memory: SlotMemory,
        node_id: str,
        secret: bytes,
        *,
        parallelism: int = 2,
        buffer_bytes: int = 0,
        tls: ssl.SSLContext | None = None,
        tls_name: str = "TLS",
    ) -> None:
        """`tls_name`: for messages, what this side shows and trusts."""
        if parallelism < 1:
            raise ValueError(f"parallelism = {parallelism}: at least 1")
        self.memory = memory
        self.parallelism = parallelism
        self.buffer_bytes = buffer_bytes
        self.tls = tls
        self.tls_name = tls_name
        self._node_id = node_id
        self._secret = secret

    def connect(self, peer: PeerAddress, incarnation: int) -> Endpoint:
        return TcpEndpoint(self, peer, incarnation)

    def initiator(self, incarnation: int) -> Initiator:
        return Initiator(
            self._secret, self._node_id, self.memory.facts,
            secrets.token_bytes(NONCE_BYTES), incarnation,
        )  # fmt: skip


class _Wire:
    """A lane with its socket's state."""

    def __init__(self, sock: socket.socket, lane: Lane) -> None:
        self.sock = sock
        self.lane = lane
        self.connected = False
        self.mask = 0


class TcpEndpoint(Endpoint):
    """See `base`. The failure of one connection is the failure of all of them."""

    def __init__(self, transport: TcpTransport, peer: PeerAddress, incarnation: int) -> None:
        self._transport = transport
        self._peer = peer
        self._incarnation = incarnation
        self._epoll = select.epoll()
        self._wires: dict[int, _Wire] = {}
        self._report = Report()
        self._opened = False
        self._depth = 1
        self._ended = False
        self._num_ops = 0
        self._guard(self._connect_all)

    def fileno(self) -> int:
        return -1 if self._ended else self._epoll.fileno()

    def wake_at(self, now: float) -> float | None:
        report = self._report
        if report.completions or report.down is not None:
            return now
        if any(wire.lane.stream.buffered() for wire in self._wires.values()):
            return now
        return None

    def post(self, ops: Sequence[Op]) -> int:
        usable = self._opened and not self._ended
        taken = ops[: max(0, self._depth - self._num_ops)] if usable else ()
        for batch in _batches(taken):
            self._num_ops += len(batch)
            self._guard(lambda batch=batch: self._post_batch(batch))  # type: ignore[misc]
        return len(taken)

    def cancel(self, op_ids: Sequence[int]) -> None:
        wanted = set(op_ids)
        for found in self._wires.values():
            found.lane.cancel(wanted, self._report)

    def poll(self, now: float) -> Report:
        if not self._ended:
            self._guard(self._move)
        report, self._report = self._report, Report()
        self._num_ops -= len(report.completions)
        return report

    def close(self) -> None:
        self._ended = True
        wires, self._wires = self._wires, {}
        for found in wires.values():
            found.lane.stream.close()
            found.sock.close()
        self._epoll.close()

    # --- moving -----------------------------------------------------------------------------

    def _move(self) -> None:
        if self._opened:
            for _ in range(len(self._wires), self._transport.parallelism):
                self._connect()
        ready = dict(self._epoll.poll(0))
        for fd, found in list(self._wires.items()):
            if fd in ready or found.lane.stream.buffered():
                self._serve(fd, found)

    def _serve(self, fd: int, found: _Wire) -> None:
        lane = found.lane
        was_open = lane.open
        if not found.connected:
            self._connected(found)
        self._report.moved_bytes += lane.flush() if was_open else 0
        lane.receive(self._report, POLL_BYTES)
        if lane.open and not was_open:
            self._announce(lane)
        self._watch(fd, found)

    def _announce(self, lane: Lane) -> None:
        accepted = lane.initiator.accepted
        assert accepted is not None
        if not self._opened:
            self._opened = True
            self._depth = accepted.depth
            self._incarnation = self._incarnation or lane.initiator.incarnation
            self._report.opened = OpenedBy(accepted.depth, lane.initiator.incarnation)

    def _post_batch(self, batch: Sequence[Op]) -> None:
        lanes = (entry for entry in self._wires.items() if entry[1].lane.open)
        fd, found = min(
            islice(lanes, self._transport.parallelism), key=lambda entry: entry[1].lane.load_bytes
        )
        found.lane.post(batch, self._report)
        found.lane.flush()
        self._watch(fd, found)

    def _watch(self, fd: int, found: _Wire) -> None:
        mask = select.EPOLLIN | (select.EPOLLOUT if found.lane.wants_write else 0)
        if mask != found.mask:
            found.mask = mask
            self._epoll.modify(fd, mask)

    # --- beginnings and ends ----------------------------------------------------------------

    def _connect_all(self) -> None:
        for _ in range(self._transport.parallelism):
            self._connect()

    def _connect(self) -> None:
        host, port = _split(self._peer.addresses[self._transport.name])
        family, address = _resolve(host, port)
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        lane = Lane(
            Stream(sock), self._transport.memory, self._transport.initiator(self._incarnation)
        )
        found = _Wire(sock, lane)
        self._wires[sock.fileno()] = found
        tune(sock, self._transport.buffer_bytes)
        error = sock.connect_ex(address)
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
        found.mask = select.EPOLLOUT
        self._epoll.register(sock.fileno(), found.mask)

    def _connected(self, found: _Wire) -> None:
        error = found.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        found.connected = True
        context = self._transport.tls
        if context is not None:
            host, _ = _split(self._peer.addresses[self._transport.name])
            secured = context.wrap_socket(
                found.sock, do_handshake_on_connect=False, server_hostname=tls_name(context, host)
            )
            found.sock, found.lane.stream = secured, TlsStream(secured)
        found.lane.start()

    def _guard(self, call: Callable[[], object]) -> None:
        """Errors become the end of the endpoint."""
        if self._ended:
            return
        try:
            call()
        except StaleIncarnationError as error:
            self._fail(DownBy(Cause.INCARNATION, str(error), error.actual))
        except RefusedError as error:
            stale = error.code == "incarnation"
            cause = Cause.INCARNATION if stale else Cause.REFUSED
            self._fail(DownBy(cause, f"{error.code}: {error}"))
        except (ssl.SSLError, ssl.CertificateError) as error:
            self._fail(DownBy(Cause.REFUSED, f"tls: {self._tls_text(error)}"))
        except (OSError, EOFError, ProtocolError) as error:
            if self._transport.tls is not None and not self._opened and self._secured:
                self._fail(DownBy(Cause.REFUSED, f"tls: {self._tls_text(error)}"))
                return
            where = self._peer.addresses.get(self._transport.name, "(no address)")
            self._fail(DownBy(Cause.CONNECTION, f"{self._peer.node_id} at {where}: {error}"))
        except (KeyError, ValueError) as error:
            self._fail(DownBy(Cause.CONNECTION, f"{self._peer.node_id}: no tcp address: {error}"))

    @property
    def _secured(self) -> bool:
        """TLS has begun, whether or not it has been agreed on."""
        return any(isinstance(found.lane.stream, TlsStream) for found in self._wires.values())

    def _tls_text(self, error: Exception) -> str:
        where = self._peer.addresses.get(self._transport.name, "(no address)")
        return tls_failed(f"{self._peer.node_id} at {where}", self._transport.tls_name, error)

    def _fail(self, down: DownBy) -> None:
        self._report.down = down
        self.close()


def _batches(ops: Sequence[Op]) -> list[list[Op]]:
    """Runs of one direction, of about `BATCH_BYTES` at most: small pieces share a request."""
    batches: list[list[Op]] = []
    size = 0
    for op in ops:
        last = batches[-1] if batches else None
        if (
            last is None
            or last[0].direction is not op.direction
            or size + op.length > BATCH_BYTES
            or len(last) == wire.MAX_ENTRIES
        ):
            batches.append([op])
            size = op.length
        else:
            last.append(op)
            size += op.length
    return batches


def _split(address: str) -> tuple[str, int]:
    """ValueError: no "host:port"."""
    host, colon, port = address.rpartition(":")
    if not colon:
        raise ValueError(f"{address!r} is no host:port")
    return host.strip("[]"), int(port)


@lru_cache(maxsize=1024)
def _resolve(host: str, port: int) -> tuple[int, tuple[str, int] | tuple[str, int, int, int]]:
    """Names are looked up once; agents register numeric addresses, for which this does not wait."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    return family, address  # type: ignore[return-value]
