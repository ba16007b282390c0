"""Two nodes with slabs of their own, joined by each transport."""

from __future__ import annotations

import mmap
import os
import select
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from workers.core.transfer_handshake import SlabFacts
from workers.core.transfer_types import Completion, Direction, Op, Piece
from workers.pool.arena import Slab
from workers.transfer.base import Endpoint, PeerAddress, Report, SlotMemory, Transport
from workers.transfer.memory import Fabric, MemoryTransport, Node
from workers.transfer.push import ReservedSlots
from workers.transfer.shm import ShmTransport
from workers.transfer.tcp import TcpTransport
from workers.transfer.tcp_server import TcpServer

HEADER = 64
SLOT = 256 * 1024
BLOCK = SLOT - HEADER
NUM_SLOTS = 24
SECRET = b"s" * 32
INCARNATION = 77
SECONDS = 20.0
TRANSPORTS = ["memory", "shm", "tcp"]


def make_memory(path: Path | None, incarnation: int, **facts: object) -> SlotMemory:
    """A slab of 24 slots, in a file or in nobody's."""
    size = SLOT * NUM_SLOTS
    if path is None:
        slab = Slab(mmap.mmap(-1, size), SLOT, HEADER)
    else:
        path.touch(0o600)
        os.truncate(path, size)
        slab = Slab.attach(path, SLOT)
    values = {"slot_bytes": SLOT, "header_bytes": HEADER, "num_slots": NUM_SLOTS} | facts
    return SlotMemory(slab, SlabFacts(**values), incarnation)  # type: ignore[arg-type]


def key_of(index: int) -> bytes:
    return index.to_bytes(16, "little")


def piece_of(index: int, **changes: int) -> Piece:
    """Slot `index` of the holder into slot `index` of the reader, generations 3 and 9."""
    values = {
        "remote_slot": index, "remote_generation": 3, "local_slot": index,
        "local_generation": 9, "block_length": BLOCK,
    } | changes  # fmt: skip
    return Piece(key=key_of(index), **values)  # type: ignore[arg-type]


def op_of(op_id: int, piece: Piece, direction: Direction = Direction.PULL) -> Op:
    return Op(op_id, direction, piece, piece.offset, piece.num_bytes)


@dataclass
class Rig:
    """`holder` has blocks, `reader` wants them."""

    name: str
    folder: Path
    holder: SlotMemory
    reader: SlotMemory
    landed: list[tuple[int, int, int]] = field(default_factory=list)
    endpoints: list[Endpoint] = field(default_factory=list)
    servers: list[TcpServer] = field(default_factory=list)
    fabric: Fabric = field(default_factory=Fabric)

    def __post_init__(self) -> None:
        self.push = ReservedSlots(lambda *landed: self.landed.append(landed))

    def serve(self, **changes: object) -> PeerAddress:
        """Make the holder reachable; `changes`: facts that it claims."""
        facts = SlabFacts(
            **({name: getattr(self.holder.facts, name) for name in SlabFacts.__struct_fields__}
               | changes)  # type: ignore[arg-type]
        )  # fmt: skip
        node = Node(self.holder, self.holder.incarnation, SECRET, self.push, facts=facts)
        self.fabric.nodes["holder"] = node
        addresses = {"memory": "-", "shm": str(self.folder / "holder.slab")}
        if self.name == "tcp":
            memory = self.holder
            if facts != memory.facts:
                memory = SlotMemory(memory.slab, memory.facts, memory.incarnation)
                memory.facts = facts
            server = TcpServer(memory, "holder", SECRET, push=self.push)
            self.servers.append(server)
            addresses["tcp"] = f"127.0.0.1:{server.address[1]}"
        return PeerAddress("holder", addresses, self.holder.incarnation, facts)

    def transport(self, secret: bytes = SECRET) -> Transport:
        if self.name == "tcp":
            return TcpTransport(self.reader, "reader", secret)
        if self.name == "shm":
            return ShmTransport(self.reader)
        return MemoryTransport(self.reader, "reader", secret, self.fabric)

    def connect(self, peer: PeerAddress, incarnation: int = 0, secret: bytes = SECRET) -> Endpoint:
        endpoint = self.transport(secret).connect(peer, incarnation)
        self.endpoints.append(endpoint)
        return endpoint

    def open(self) -> Endpoint:
        endpoint = self.connect(self.serve())
        report = self.wait(endpoint, lambda seen: seen.opened is not None)
        assert report.down is None
        return endpoint

    def fill(self, *indices: int) -> dict[int, bytes]:
        """Blocks of the holder, at generation 3."""
        blocks = {index: os.urandom(BLOCK) for index in indices}
        for index, data in blocks.items():
            self.holder.slab.write_block(index, 3, key_of(index), data)
        return blocks

    def wait(self, endpoint: Endpoint, holds: Callable[[Report], bool]) -> Report:
        """Poll until what was seen since holds."""
        seen = Report()
        deadline = time.monotonic() + SECONDS
        while not holds(seen):
            now = time.monotonic()
            assert now < deadline, f"not in time: {seen}"
            due = endpoint.wake_at(now)
            if due is None or due > now:
                fd = endpoint.fileno()
                select.select([fd] if fd >= 0 else [], [], [], 0.02)
            report = endpoint.poll(time.monotonic())
            seen.completions += report.completions
            seen.moved_bytes += report.moved_bytes
            seen.opened = seen.opened or report.opened
            seen.down = seen.down or report.down
        return seen

    def finish(self, endpoint: Endpoint, ops: list[Op]) -> dict[int, Completion]:
        """Post all, however often it takes; the completions by op."""
        waiting, done = list(ops), {}
        while len(done) < len(ops):
            del waiting[: endpoint.post(waiting)]
            report = self.wait(endpoint, lambda seen: bool(seen.completions or seen.down))
            assert report.down is None, report.down
            for completion in report.completions:
                assert completion.op_id not in done, "it ended twice"
                done[completion.op_id] = completion
        return done

    def local(self, index: int) -> bytes:
        return bytes(self.reader.slab.payload(index, BLOCK))

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()
        for server in self.servers:
            server.close()
        self.holder.slab.close()
        self.reader.slab.close()


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[[str], Rig]]:
    made: list[Rig] = []

    def make(name: str) -> Rig:
        folder = tmp_path / uuid.uuid4().hex
        folder.mkdir()
        holder = make_memory(folder / "holder.slab", INCARNATION)
        made.append(Rig(name, folder, holder, make_memory(None, 5)))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture(params=TRANSPORTS)
def rig(request: pytest.FixtureRequest, make_rig: Callable[[str], Rig]) -> Rig:
    """Once for each transport."""
    return make_rig(request.param)


@pytest.fixture(params=[name for name in TRANSPORTS if name != "shm"])
def wired(request: pytest.FixtureRequest, make_rig: Callable[[str], Rig]) -> Rig:
    """Transports with a handshake of their own: a file's mode is shm's secret."""
    return make_rig(request.param)


@pytest.fixture
def op() -> Callable[..., Op]:
    """`op(id, index, direction, **changes of the piece)`."""

    def make(op_id: int, index: int, direction: Direction = Direction.PULL, **changes: int) -> Op:
        return op_of(op_id, piece_of(index, **changes), direction)

    return make
