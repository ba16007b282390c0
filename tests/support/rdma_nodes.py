"""Nodes that speak RDMA, and endpoints driven without an engine. For tests in the VM."""

from __future__ import annotations

import mmap
import random
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workers.core.blocks import SLOT_HEADER_BYTES
from workers.core.transfer_handshake import SlabFacts
from workers.core.transfer_types import Completion, Direction, Op, Piece
from workers.pool.arena import Slab
from workers.transfer.base import DownBy, Endpoint, PeerAddress, PushTarget, Report, SlotMemory
from workers.transfer.rdma.node import RdmaNode
from workers.transfer.rdma.server import RdmaServer
from workers.transfer.rdma.settings import RdmaSettings
from workers.transfer.rdma.transport import RdmaEndpoint, RdmaTransport

SECRET = bytes(range(32))
KIB, MIB = 1 << 10, 1 << 20
ONE_DEVICE = RdmaSettings(devices=("rxe0",))
rng = random.Random(4)


def key_of(slot: int) -> bytes:
    return slot.to_bytes(16, "little")


def make_memory(num_slots: int, payload: int, incarnation: int = 1) -> SlotMemory:
    slot_bytes = -(-(payload + SLOT_HEADER_BYTES) // 4096) * 4096
    slab = Slab(mmap.mmap(-1, num_slots * slot_bytes), slot_bytes, SLOT_HEADER_BYTES)
    return SlotMemory(slab, SlabFacts(slot_bytes, SLOT_HEADER_BYTES, num_slots), incarnation)


@dataclass
class Node:
    """A node of the tests; the server only where it holds blocks."""

    name: str
    memory: SlotMemory
    rdma: RdmaNode
    transport: RdmaTransport
    server: RdmaServer | None = None
    endpoints: list[RdmaEndpoint] = field(default_factory=list)

    @property
    def address(self) -> PeerAddress:
        assert self.server is not None
        host, port = self.server.address
        return PeerAddress(self.name, {"rdma": f"{host}:{port}"}, self.memory.incarnation)

    def fill(self, slots: Sequence[int], length: int, generation: int = 1) -> dict[int, bytes]:
        pattern = rng.randbytes(length)
        written = {}
        for slot in slots:
            data = slot.to_bytes(8, "little") + pattern[8:]
            self.memory.slab.write_block(slot, generation, key_of(slot), data)
            written[slot] = data
        return written

    def connect(self, peer: Node | PeerAddress, incarnation: int = 0) -> RdmaEndpoint:
        address = peer.address if isinstance(peer, Node) else peer
        endpoint = self.transport.connect(address, incarnation)
        assert isinstance(endpoint, RdmaEndpoint)
        self.endpoints.append(endpoint)
        return endpoint

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()
        if self.server is not None:
            self.server.close()
        left = self.rdma.queue_pairs
        self.rdma.close()
        assert left == 0, "queue pairs were left"


class Nodes:
    """Makes nodes, and closes them in the end."""

    def __init__(self) -> None:
        self._made: list[Node] = []

    def make(
        self,
        name: str,
        num_slots: int = 64,
        payload: int = 64 * KIB,
        *,
        serve: bool = False,
        settings: RdmaSettings = ONE_DEVICE,
        incarnation: int = 1,
        push: PushTarget | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        memory: SlotMemory | None = None,
    ) -> Node:
        memory = memory or make_memory(num_slots, payload, incarnation)
        rdma = RdmaNode(memory, settings)
        node = Node(name, memory, rdma, RdmaTransport(rdma, name, SECRET))
        self._made.append(node)
        if serve:
            node.server = RdmaServer(rdma, name, SECRET, push=push, host=host, port=port)
        return node

    def pair(self, **kwargs: object) -> tuple[Node, Node]:
        """(puller, holder), alike."""
        return self.make("puller", **kwargs), self.make("holder", serve=True, **kwargs)  # type: ignore[arg-type]

    def close(self) -> None:
        while self._made:
            self._made.pop().close()


class Driver:
    """Polls an endpoint as the engine does."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.completions: dict[int, Completion] = {}
        self.down: DownBy | None = None
        self.opened = False
        self.depth = 0
        self.incarnation = 0
        self.moved_bytes = 0

    def poll(self) -> Report:
        report = self.endpoint.poll(time.monotonic())
        if report.opened is not None:
            self.opened, self.depth = True, report.opened.depth
            self.incarnation = report.opened.incarnation
        for completion in report.completions:
            assert completion.op_id not in self.completions, "an op ended twice"
            self.completions[completion.op_id] = completion
        self.moved_bytes += report.moved_bytes
        if report.down is not None:
            assert self.down is None, "down twice"
            self.down = report.down
        return report

    def until(self, done: Callable[[], bool], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            self.poll()
            if done():
                return
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.down}"
            _wait(self.endpoint)

    def open(self) -> Driver:
        self.until(lambda: self.opened or self.down is not None)
        assert self.opened, self.down
        return self

    def move(self, ops: Sequence[Op], seconds: float = 60) -> dict[int, Completion]:
        """Post all of them, window by window, until each has ended or the endpoint went down."""
        left = list(ops)

        def step() -> bool:
            while left and self.down is None:
                taken = self.endpoint.post(left)
                del left[:taken]
                if not taken:
                    break
            ended = all(op.id in self.completions for op in ops)
            return (not left and ended) or self.down is not None

        self.until(step, seconds)
        return {op.id: self.completions[op.id] for op in ops if op.id in self.completions}


def _wait(endpoint: Endpoint) -> None:
    """As the engine: on the descriptor, until `wake_at`."""
    now = time.monotonic()
    at = endpoint.wake_at(now)
    pause = 0.05 if at is None else max(0.0, min(0.05, at - now))
    if pause and endpoint.fileno() >= 0:
        poller = select.poll()
        poller.register(endpoint.fileno(), select.POLLIN)
        poller.poll(1000 * pause)


_ids = iter(range(1, 1 << 30))


def op_of(
    slot: int,
    length: int,
    *,
    local: int | None = None,
    generation: int = 1,
    direction: Direction = Direction.PULL,
    offset: int = 0,
    size: int = -1,
    key: bytes | None = None,
) -> Op:
    """Slot to slot of the same number, unless `local` is given."""
    here = slot if local is None else local
    piece = Piece(slot, generation, here, generation, key or key_of(slot), length)
    return Op(next(_ids), direction, piece, offset, length if size < 0 else size)
