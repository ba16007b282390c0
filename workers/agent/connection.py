"""One client's connection: frames in, handler, frames out. Slow readers are held back."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final, cast

from workers.agent.events import Subscriber
from workers.agent.node import Node
from workers.agent.session import Session
from workers.core.control_proof import NONCE_BYTES, challenge, client_proved
from workers.core.errors import ProtocolError
from workers.core.framing import FrameBuffer, decode_request, encode_reply
from workers.core.messages import MAX_FRAME_BYTES, Hello, Refused, ReplyBody, Request, Welcome
from workers.core.transfer_handshake import fingerprint
from workers.core.transfer_messages import Challenge, Prove
from workers.transfer_tls import is_client_hello, tls_refused

HELLO_TIMEOUT_SECONDS: Final = 10.0
MAX_HELLO_BYTES: Final = 256 * 1024
"""Of a frame before the proof: strangers must not make the agent hold much."""
MAX_CONNECTIONS: Final = 1024
WRITE_BUFFER_BYTES: Final = 1 << 20

_log = logging.getLogger(__name__)


class Connections:
    """The open connections of one agent."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.open: set[Connection] = set()
        self._last_number = 0

    def make(self) -> Connection:
        """For a socket whose file says who may connect."""
        self._last_number += 1
        return Connection(self, self._last_number)

    def make_tcp(self) -> Connection:
        """For a network: the client proves the cluster secret, where the agent has one."""
        self._last_number += 1
        return Connection(self, self._last_number, self.node.settings.secret)

    def close_all(self) -> None:
        for connection in list(self.open):
            connection.abort()


class Connection(asyncio.Protocol):
    """Runs on the event loop; every request is answered before the next is read."""

    def __init__(self, connections: Connections, number: int, secret: bytes | None = None) -> None:
        self._connections = connections
        self._node = connections.node
        self._number = number
        self._secret = secret
        self._challenged: tuple[Hello, Challenge] | None = None
        self._frames = FrameBuffer(MAX_FRAME_BYTES if secret is None else MAX_HELLO_BYTES)
        self._session: Session | None = None
        self._transport: asyncio.Transport | None = None
        self._hello_timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self._connections.open) >= MAX_CONNECTIONS:
            self._refuse(0, Refused("too_many_connections", f"{MAX_CONNECTIONS} are open already."))
            return
        self._connections.open.add(self)
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(HELLO_TIMEOUT_SECONDS, self.abort)

    def data_received(self, data: bytes) -> None:
        if self._session is None and is_client_hello(data):
            _log.warning("client_refused code=tls n=%d", self._number)
            self._refuse(0, Refused("tls", tls_refused(self._node.settings.node_id)))
            return
        try:
            for document in self._frames.feed(data):
                self._answer(decode_request(document))
        except ProtocolError as error:
            self._refuse(0, Refused("protocol", str(error)))
        except Exception:
            # A fault of ours must cost this client its connection and nobody else anything.
            _log.exception("request_failed connection=%d", self._number)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.open.discard(self)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._session is not None:
            _log.info("client_left client=%s n=%d", self._session.hello.client_id, self._number)
            self._session = None
            self._node.goodbye(self._number)

    def pause_writing(self) -> None:
        """The client does not read: stop taking its requests, let its events wait."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        if self._session is not None and self._session.subscriber is not None:
            self._session.subscriber.pause()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        if self._session is not None and self._session.subscriber is not None:
            self._session.subscriber.resume()

    # --- ours -------------------------------------------------------------------------------

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, request: Request) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._session is not None:
            self._send(request.seq, self._node.handle(self._session, request.body))
        elif isinstance(request.body, Hello) and self._secret is None:
            self._greet(request.seq, request.body)
        elif isinstance(request.body, Hello) and self._secret is not None:
            self._challenge(request.seq, request.body, self._secret)
        elif isinstance(request.body, Prove) and self._challenged and self._secret is not None:
            self._judge(request.seq, request.body.proof, self._secret)
        else:
            self._refuse(request.seq, Refused("hello_first", "Say Hello before anything else."))

    def _greet(self, seq: int, hello: Hello) -> None:
        reply = self._node.welcome(self._number, hello, self._make_subscriber)
        if isinstance(reply, Refused):
            _log.warning("client_refused client=%s code=%s", hello.client_id, reply.code)
            self._refuse(seq, reply)
            return
        self._session = self._node.sessions[self._number]
        self._frames.limit = MAX_FRAME_BYTES
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        _log.info("client_joined client=%s role=%s n=%d", hello.client_id, hello.role, self._number)
        self._send(seq, reply)

    def _challenge(self, seq: int, hello: Hello, secret: bytes) -> None:
        node_id, nonce = self._node.settings.node_id, secrets.token_bytes(NONCE_BYTES)
        said = challenge(secret, hello, node_id, nonce, fingerprint(secret))
        self._challenged = (hello, said)
        self._send(seq, said)

    def _judge(self, seq: int, proof: bytes, secret: bytes) -> None:
        assert self._challenged is not None
        hello, said = self._challenged
        self._challenged = None
        if client_proved(secret, hello, said, proof):
            self._greet(seq, hello)
            return
        _log.warning("client_refused client=%s code=secret", hello.client_id)
        self._refuse(seq, Refused("secret", f"{hello.client_id} did not prove the cluster secret"))

    def _make_subscriber(self) -> Subscriber:
        return Subscriber(self._node.log, self._node.readable_runs, self._write)

    def _send(self, seq: int, body: ReplyBody | Welcome) -> None:
        self._write(encode_reply(seq, body))

    def _refuse(self, seq: int, refused: Refused) -> None:
        """Say no and hang up."""
        self._send(seq, refused)
        if self._transport is not None:
            self._transport.close()

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)
