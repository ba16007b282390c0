"""The transfer engine over RDMA: windows, retries and recovery are its own, the path is this one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from rdma_nodes import KIB, Node, Nodes, key_of

from workers.core.transfer_types import (
    Cause,
    Direction,
    Piece,
    Priority,
    TransferLimits,
    TransferRequest,
    TransferResult,
    TransferState,
)
from workers.transfer.base import PeerAddress
from workers.transfer.engine import TransferEngine
from workers.transfer.push import ReservedSlots

BLOCK = 64 * KIB
_names = iter(range(1, 1 << 30))


def request(
    peer: str, pieces: tuple[Piece, ...], seconds: float = 60, **changes: object
) -> TransferRequest:
    deadline = time.monotonic() + seconds
    return TransferRequest(f"t{next(_names)}", peer, pieces, deadline, **changes)  # type: ignore[arg-type]


def pieces_of(slots: range, generation: int = 1, **changes: int) -> tuple[Piece, ...]:
    return tuple(Piece(slot, generation, slot, 9, key_of(slot), BLOCK, **changes) for slot in slots)


class Pair:
    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.puller = nodes.make("puller")
        self.engine = TransferEngine(
            "puller",
            self.puller.memory,
            [self.puller.transport],
            limits=TransferLimits(connect_seconds=5.0, stall_seconds=10.0),
        )
        self.engine.start()

    def know(self, holder: Node) -> None:
        self.engine.set_peer(holder.address)

    def run(self, wanted: TransferRequest) -> TransferResult:
        return self.engine.submit(wanted).result(timeout=90)


@pytest.fixture
def pair(nodes: Nodes) -> Iterator[Pair]:
    made = Pair(nodes)
    yield made
    made.engine.close()


@pytest.mark.parametrize("piece_bytes", [0, 20_000], ids=["whole", "packets"])
def test_transfers_complete(pair: Pair, nodes: Nodes, piece_bytes: int) -> None:
    holder = nodes.make("holder", serve=True)
    data = holder.fill(range(64), BLOCK)
    pair.know(holder)
    result = pair.run(request("holder", pieces_of(range(64)), piece_bytes=piece_bytes))
    assert (result.state, result.missing) == (TransferState.COMPLETED, {})
    assert result.num_bytes == 64 * BLOCK
    for slot in range(64):
        assert pair.puller.memory.slab.read_block(slot, 9, key_of(slot)) == data[slot]


def test_layers_of_blocks(pair: Pair, nodes: Nodes) -> None:
    holder = nodes.make("holder", serve=True)
    data = holder.fill(range(8), BLOCK)
    pair.know(holder)
    layers = tuple(
        piece
        for layer in range(4)
        for piece in pieces_of(range(8), offset=layer * BLOCK // 4, length=BLOCK // 4)
    )
    result = pair.run(request("holder", layers))
    assert result.state is TransferState.COMPLETED
    assert pair.puller.memory.slab.read_block(3, 9, key_of(3)) == data[3]


def test_pushes(pair: Pair, nodes: Nodes) -> None:
    landed: list[int] = []
    done = threading.Event()
    reserved = ReservedSlots(
        lambda slot, *_: (landed.append(slot), len(landed) == 32 and done.set())
    )  # type: ignore[func-returns-value]
    decode = nodes.make("decode", serve=True, push=reserved)
    data = pair.puller.fill(range(32), BLOCK, generation=9)
    for slot in range(32):
        reserved.reserve(slot, 1, key_of(slot), BLOCK)
    pair.know(decode)
    result = pair.run(
        request("decode", pieces_of(range(32)), direction=Direction.PUSH, priority=Priority.BATCH)
    )
    assert result.state is TransferState.COMPLETED
    assert done.wait(10)
    assert decode.memory.slab.read_block(31, 1, key_of(31)) == data[31]


def test_a_broken_path_is_made_anew_and_the_transfer_ends_well(pair: Pair, nodes: Nodes) -> None:
    holder = nodes.make("holder", serve=True)
    holder.fill(range(64), BLOCK)
    pair.know(holder)
    future = pair.engine.submit(request("holder", pieces_of(range(64)), piece_bytes=16_384))
    deadline = time.monotonic() + 30
    while not holder.rdma.queue_pairs and time.monotonic() < deadline:
        time.sleep(0.001)
    assert holder.server is not None
    for sock in list(holder.server._connections):
        sock.shutdown(socket.SHUT_RDWR)  # the holder drops its queue pairs
    result = future.result(timeout=60)
    assert result.state is TransferState.COMPLETED
    assert pair.run(request("holder", pieces_of(range(4)))).state is TransferState.COMPLETED


def test_c09_a_restarted_holder_serves_again(pair: Pair, nodes: Nodes) -> None:
    first = nodes.make("holder", serve=True, incarnation=1)
    first.fill(range(4), BLOCK)
    pair.know(first)
    assert pair.run(request("holder", pieces_of(range(4)))).state is TransferState.COMPLETED
    assert first.server is not None
    port = first.server.address[1]
    first.server.close()
    second = nodes.make("holder", serve=True, incarnation=2, port=port)
    second.fill(range(4), BLOCK, generation=5)
    pair.know(second)
    old = pair.run(request("holder", pieces_of(range(4)), incarnation=1))
    assert set(old.missing.values()) == {Cause.INCARNATION}
    new = pair.run(request("holder", pieces_of(range(4), generation=5), incarnation=2))
    assert new.state is TransferState.COMPLETED, new


def test_c07_a_peer_that_fails_every_connection_is_left_alone(pair: Pair) -> None:  # C07, C08
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refusing = threading.Thread(target=_hang_up, args=(listener,), daemon=True)
        refusing.start()
        port = listener.getsockname()[1]
        pair.engine.set_peer(PeerAddress("bad", {"rdma": f"127.0.0.1:{port}"}))
        causes = set()
        for _ in range(200):
            causes |= set(pair.run(request("bad", pieces_of(range(1)), 20)).missing.values())
        (link,) = pair.engine.stats().links
        assert Cause.PEER_DOWN in causes
        assert link.breaker == "open" or link.opens_total < 20
        assert link.opens_total < 20, "it backs off"
        assert pair.puller.rdma.queue_pairs == 0
        assert len(pair.engine.stats().alarms) == 1
        listener.shutdown(socket.SHUT_RDWR)
    refusing.join(10)


def _hang_up(listener: socket.socket) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.close()
