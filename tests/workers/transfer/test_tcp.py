"""What is particular to TCP: strangers, bounds, TLS, peers that say nothing."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.core.transfer_handshake import Initiator, SlabFacts
from workers.core.transfer_types import Cause, Direction, Op, Piece
from workers.transfer import tcp_server
from workers.transfer import tcp_wire as wire
from workers.transfer.base import PeerAddress
from workers.transfer.tcp import TcpTransport
from workers.transfer.tcp_server import TcpServer

BLOCK = 256 * 1024 - 64
SECRET = b"s" * 32
Rig = Any


@pytest.fixture
def rig(make_rig: Callable[[str], Rig]) -> Rig:
    return make_rig("tcp")


def dial(peer: PeerAddress) -> socket.socket:
    host, _, port = peer.addresses["tcp"].partition(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    sock.settimeout(20)
    return sock


def frame(document: bytes) -> bytes:
    return struct.pack("<I", len(document)) + document


def receive_frame(sock: socket.socket) -> bytes:
    head = sock.recv(4, socket.MSG_WAITALL)
    return sock.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)


def read_request(slot: int) -> bytes:
    entry = wire.READ_ENTRY.pack(1, slot, 0, 3, BLOCK, 0, BLOCK, slot.to_bytes(16, "little"))
    return wire.pack_head(wire.READ, 1) + entry


class TestStrangers:
    @pytest.mark.parametrize(
        "said",
        [
            read_request(1),
            frame(b"not msgpack"),
            b"GET / HTTP/1.1\r\n\r\n",
            struct.pack("<I", 1 << 30),
            frame(Initiator(SECRET, "x", SlabFacts(1, 1, 1), b"short").start()),
        ],
    )
    def test_who_does_not_shake_hands_reads_nothing(self, rig: Rig, said: bytes) -> None:
        rig.fill(1)
        with dial(rig.serve()) as sock:
            sock.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1 << 20) == b""
        assert rig.servers[0].served_bytes == 0

    def test_who_sends_a_byte_now_and_then_is_let_go(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_server, "HANDSHAKE_SECONDS", 1)
        with dial(rig.serve()) as sock:
            sock.sendall(struct.pack("<I", 1000))
            began = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < began + 20:
                    sock.sendall(b"x")
                    sock.settimeout(0.4)
                    with contextlib.suppress(TimeoutError):
                        assert sock.recv(1) == b""
                        break
            assert time.monotonic() - began < 15

    def test_a_recorded_proof_opens_nothing(self, rig: Rig) -> None:
        """Nonces differ each time: what was overheard is of no use."""
        rig.fill(1)
        peer = rig.serve()
        facts = rig.reader.facts
        with dial(peer) as sock:
            good = Initiator(SECRET, "reader", facts, b"n" * 32)
            sock.sendall(frame(good.start()))
            answer = good.receive(receive_frame(sock))
            assert answer is not None
        with dial(peer) as sock:
            sock.sendall(frame(good.start()))
            receive_frame(sock)
            sock.sendall(frame(answer) + read_request(1))
            assert b"did not prove" in receive_frame(sock)
            assert rig.servers[0].served_bytes == 0

    def test_rubbish_after_the_handshake_ends_the_connection_only(self, rig: Rig) -> None:
        data = rig.fill(1)[1]
        endpoint = rig.open()
        peer = rig.serve()
        with dial(peer) as sock:
            hands = Initiator(SECRET, "reader", rig.reader.facts, b"n" * 32)
            sock.sendall(frame(hands.start()))
            answer = hands.receive(receive_frame(sock))
            assert answer is not None
            sock.sendall(frame(answer))
            assert hands.receive(receive_frame(sock)) is None
            sock.sendall(b"x" * 64)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b""
        from_op = rig.finish(endpoint, [pull(1, 1)])
        assert from_op[1].cause is None
        assert rig.local(1) == data


def pull(op_id: int, index: int) -> Any:
    piece = Piece(index, 3, index, 9, index.to_bytes(16, "little"), BLOCK)
    return Op(op_id, Direction.PULL, piece, 0, BLOCK)


class TestBounds:
    def test_connections_are_bounded(
        self,
        rig: Rig,
        eventually: Callable[[Callable[[], bool]], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        server = TcpServer(rig.holder, "holder", SECRET, max_connections=2)
        rig.servers.append(server)
        socks = [socket.create_connection(server.address, timeout=20) for _ in range(5)]
        eventually(lambda: server.refused == 3)
        assert server.num_connections == 2
        assert caplog.text.count("too_many_connections node=holder: 2 are open") == 1
        for sock in socks:
            sock.close()
        eventually(lambda: server.num_connections == 0)

    def test_closing_ends_threads_and_connections(self, rig: Rig) -> None:
        before = set(threading.enumerate())
        endpoint = rig.open()
        rig.servers[0].close()
        report = rig.wait(endpoint, lambda seen: seen.down is not None)
        assert report.down.cause is Cause.CONNECTION
        left = [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
        assert left == []

    def test_a_peer_that_accepts_and_says_nothing_opens_nothing(self, rig: Rig) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            endpoint = rig.connect(PeerAddress("holder", {"tcp": address}, 77))
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                report = endpoint.poll(time.monotonic())
                assert report.opened is None
                assert report.down is None, "the engine's bound ends it, not the endpoint"
                time.sleep(0.02)
            assert endpoint.post([pull(1, 1)]) == 0

    @pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:notaport"])
    def test_an_address_that_is_none(self, rig: Rig, address: str) -> None:
        endpoint = rig.connect(PeerAddress("holder", {"tcp": address}, 77))
        report = rig.wait(endpoint, lambda seen: seen.down is not None)
        assert report.down.cause is Cause.CONNECTION


class TestTls:
    @pytest.fixture
    def contexts(self, tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Of the server and of a client that trusts only its certificate."""
        openssl = shutil.which("openssl")
        assert openssl, "the tests need the openssl program"
        cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        command = [
            openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-keyout", str(key), "-out", str(cert), "-days", "30",
            "-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(cert, key)
        return server, ssl.create_default_context(cafile=str(cert))

    def test_blocks_travel_under_tls(
        self, rig: Rig, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
    ) -> None:
        blocks = rig.fill(*range(10))
        server = TcpServer(rig.holder, "holder", SECRET, tls=contexts[0], push=rig.push)
        rig.servers.append(server)
        transport = TcpTransport(rig.reader, "reader", SECRET, tls=contexts[1])
        address = {"tcp": f"127.0.0.1:{server.address[1]}"}
        endpoint = transport.connect(PeerAddress("holder", address, 77), 77)
        rig.endpoints.append(endpoint)
        rig.wait(endpoint, lambda seen: seen.opened is not None)
        done = rig.finish(endpoint, [pull(index, index) for index in range(10)])
        assert {completion.cause for completion in done.values()} == {None}
        assert {index: rig.local(index) for index in range(10)} == blocks

    def test_a_plain_client_gets_nowhere(
        self, rig: Rig, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
    ) -> None:
        server = TcpServer(rig.holder, "holder", SECRET, tls=contexts[0])
        rig.servers.append(server)
        address = {"tcp": f"127.0.0.1:{server.address[1]}"}
        endpoint = rig.connect(PeerAddress("holder", address, 77))
        report = rig.wait(endpoint, lambda seen: seen.down is not None)
        assert report.down.cause is Cause.REFUSED
