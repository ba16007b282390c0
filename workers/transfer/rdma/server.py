"""Lets peers in: handshake over TCP, queue pairs, answers to control messages.

The blocks themselves are read and written by the device. One thread a peer, which sleeps in the
kernel nearly always; when the peer's TCP connection ends, its queue pairs go, and with them its
access.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import threading
import time
from typing import Final

from workers.core.errors import ProtocolError
from workers.core.messages import Refused
from workers.core.rdma_choice import choose_mtu
from workers.core.transfer_handshake import NONCE_BYTES, Responder
from workers.transfer.base import PushTarget
from workers.transfer.push import NoSlots
from workers.transfer.rdma import control, joining
from workers.transfer.rdma.frames import FramedSocket
from workers.transfer.rdma.node import RdmaNode
from workers.transfer.rdma.port import Scratch
from workers.transfer.rdma.queue_pair import QueuePair
from workers.transfer.rdma.send_queue import SendQueue
from workers.transfer.rdma.serving import Answers
from workers.transfer.rdma.status import SUCCESS, meaning_of

HANDSHAKE_SECONDS: Final = 3.0
MAX_CONNECTIONS: Final = 256
DEPTH: Final = 1024
_WAIT_MS: Final = 500
_log = logging.getLogger(__name__)


class RdmaServer:
    """Listens from `__init__` on; `close` ends every connection, thread and queue pair of it."""

    def __init__(
        self,
        node: RdmaNode,
        node_id: str,
        secret: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        push: PushTarget | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.node = node
        self.node_id = node_id
        self.push: PushTarget = push or NoSlots()
        self.remote_write = node.remote_write and not isinstance(self.push, NoSlots)
        self.refused = 0
        self.taken_bytes = 0
        self._secret = secret
        self._max_connections = max_connections
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self.closing = False
        self._listener = socket.create_server((host, port), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(
            target=self._accept, name=f"rdma-accept-{node_id}", daemon=True
        )
        self._acceptor.start()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        self.closing = True
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
        memory = self.node.memory
        offer = joining.offer_of(self.node.ports, remote_write=self.remote_write)
        return Responder(
            self._secret, self.node_id, memory.incarnation, memory.facts,
            secrets.token_bytes(NONCE_BYTES), depth=DEPTH, extra={joining.EXTRA: offer},
        )  # fmt: skip

    def _accept(self) -> None:
        while not self.closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self.closing:
                    return
                time.sleep(0.05)  # out of descriptors, say: others will end
                continue
            with self._lock:
                if self.closing or len(self._connections) >= self._max_connections:
                    self.refused += 1
                    sock.close()
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(sock,), name="rdma-serve", daemon=True
                )
                self._connections[sock] = thread
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        connection: _Connection | None = None
        try:
            connection = _Connection(self, FramedSocket(sock))
            connection.run()
        except (OSError, ProtocolError, EOFError, ValueError) as error:
            peer = "(unknown)" if connection is None else connection.peer
            _log.debug("RDMA connection of %s ended: %s", peer, error)
        finally:
            if connection is not None:
                connection.close()
            with self._lock:
                self._connections.pop(sock, None)
            sock.close()


class _Connection:
    """One peer."""

    def __init__(self, server: RdmaServer, frames: FramedSocket) -> None:
        self._server = server
        self._node = server.node
        self._frames = frames
        self._pairs: list[QueuePair] = []
        self._scratch = Scratch(control.Mailbox.num_bytes())
        self._mailbox: control.Mailbox | None = None
        self._control_port = server.node.ports[0]
        self._answers = Answers(server.node.memory, server.push, remote_write=server.remote_write)
        self.peer = "(unknown)"

    def run(self) -> None:
        """Until the peer leaves or breaks the rules."""
        if not self._shake_hands():
            self._server.refused += 1
            return
        self._join()
        pair, poller = self._pairs[0], select.poll()
        poller.register(pair.descriptor, select.POLLIN)
        poller.register(self._frames.fileno(), select.POLLIN)
        pair.arm()
        self._answer_all(pair)
        while not self._server.closing:
            for descriptor, _ in poller.poll(_WAIT_MS):
                if descriptor != pair.descriptor:
                    if self._frames.receive():
                        raise ProtocolError("a document after the connection was made")
                    continue
                pair.take_events()
                pair.arm()
                self._answer_all(pair)

    def close(self) -> None:
        """Access ends first, then slots that were being written are given back."""
        while self._pairs:
            self._pairs.pop().close()
        if self._mailbox is not None:
            self._mailbox.close()
        self._scratch.close()
        self._answers.end()

    # --- getting acquainted -----------------------------------------------------------------

    def _shake_hands(self) -> bool:
        responder = self._server.responder()
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        while not responder.done and responder.refused is None:
            self._frames.send(responder.receive(self._await_document(deadline)))
        self.peer = responder.peer
        return responder.done

    def _join(self) -> None:
        message = joining.decode(self._await_document(time.monotonic() + HANDSHAKE_SECONDS))
        if not isinstance(message, joining.Join):
            raise ProtocolError(f"{type(message).__name__} where Join was due")
        if not 0 < len(message.rails) <= joining.MAX_RAILS:
            raise ProtocolError(f"{len(message.rails)} rails")
        grants = [self._try(ask) for ask in message.rails]
        if not self._pairs:
            text = f"{self._server.node_id}: no queue pair: {grants[0].error}"
            self._frames.send(joining.encode(Refused("rdma", text)))
            raise OSError(text)
        self._open_mailbox()
        memory = self._node.memory
        self._frames.send(joining.encode(joining.Joined(grants, memory.address, memory.num_bytes)))

    def _try(self, ask: joining.RailAsk) -> joining.RailGrant:
        """A rail that cannot be does not stand in the way of others."""
        before = len(self._pairs)
        try:
            return self._connect(ask)
        except OSError as error:
            while len(self._pairs) > before:
                self._pairs.pop().close()
            return joining.RailGrant(joining.NO_ADDRESS, 0, str(error))

    def _connect(self, ask: joining.RailAsk) -> joining.RailGrant:
        if not 0 <= ask.port < len(self._node.ports):
            raise ProtocolError(f"rail to port {ask.port} of {len(self._node.ports)}")
        port, region = self._node.ports[ask.port], self._node.regions[ask.port]
        first = not self._pairs
        queues = port.control_queues(2 * control.SLOTS if first else 2)
        pair = port.queue_pair(queues, remote_read=True, remote_write=self._server.remote_write)
        self._pairs.append(pair)
        psn = secrets.randbits(24)
        mtu = choose_mtu(port.active_mtu, ask.mtu).mtu
        pair.connect(ask.address, psn=psn, mtu=mtu, reads=min(queues.reads, max(1, ask.reads)))
        if first:
            self._control_port = port
        return joining.RailGrant(pair.address(psn), region.rkey)

    def _open_mailbox(self) -> None:
        pair = self._pairs[0]
        self._queue: SendQueue[control.Sent] = SendQueue(pair.queues.send_requests, 1, pair)
        lkey = self._scratch.register(self._control_port)
        self._mailbox = control.Mailbox(pair, self._queue, self._scratch, lkey)
        self._mailbox.post_receives(self._control_port.verbs.wr)

    def _await_document(self, deadline: float) -> bytes:
        poller = select.poll()
        poller.register(self._frames.fileno(), select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and not self._server.closing:
            if poller.poll(1000 * min(left, 0.5)):
                documents = self._frames.receive()
                if len(documents) > 1:
                    raise ProtocolError("more than one document at a time")
                if documents:
                    return documents[0]
        raise OSError("no answer in the handshake")

    # --- answers ----------------------------------------------------------------------------

    def _answer_all(self, pair: QueuePair) -> None:
        mailbox = self._mailbox
        assert mailbox is not None
        while found := pair.poll():
            for done in found:
                if done.status != SUCCESS:
                    meaning = meaning_of(done.status)
                    raise OSError(f"{meaning.name}: {meaning.text}")
                if done.received:
                    before = self._answers.taken_bytes
                    mailbox.put(self._answers.answer(mailbox.receive(done)))
                    self._server.taken_bytes += self._answers.taken_bytes - before
                else:
                    for token in self._queue.complete(done.wr_id, ok=True)[0]:
                        mailbox.sent(token)
            mailbox.pump()
            if self._queue.submit():
                raise OSError("the device takes no answers")
