"""Blocks that land in memory which is known by its address only, as a GPU's is."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile

import pytest
from rdma_nodes import KIB, MIB, Driver, Nodes, op_of

from workers.core.blocks import SLOT_HEADER_BYTES
from workers.core.errors import ConfigError
from workers.core.transfer_handshake import SlabFacts
from workers.core.transfer_types import Cause
from workers.transfer.base import MemoryKind, Region
from workers.transfer.regions import HostCopier, RegionMemory

SLOTS = 8
SLOT = 64 * KIB + 4096
PAYLOAD = SLOT - SLOT_HEADER_BYTES
FACTS = SlabFacts(SLOT, SLOT_HEADER_BYTES, SLOTS)


class Elsewhere:
    """Memory that has two mappings: one whose address is told, one that the test looks at."""

    def __init__(self, access: int) -> None:
        file = os.memfd_create("elsewhere")
        os.truncate(file, SLOTS * SLOT)
        self.seen = mmap.mmap(file, SLOTS * SLOT)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        self.address = libc.mmap(
            None, ctypes.c_size_t(SLOTS * SLOT), access, mmap.MAP_SHARED, file, 0
        )
        os.close(file)
        self.copied: list[str] = []

    def region(self, **changes: int) -> Region:
        return Region(self.address, SLOTS * SLOT, MemoryKind.CUDA, **changes)

    # As a copier: by the second mapping, where the first one cannot be written.

    def to_host(self, address: int, target: memoryview) -> None:
        at = address - self.address
        target[:] = self.seen[at : at + len(target)]
        self.copied.append("to_host")

    def from_host(self, address: int, source: memoryview) -> None:
        at = address - self.address
        self.seen[at : at + len(source)] = source
        self.copied.append("from_host")

    def payload(self, slot: int, length: int) -> bytes:
        return self.seen[slot * PAYLOAD : slot * PAYLOAD + length]


@pytest.fixture
def writable() -> Elsewhere:
    return Elsewhere(mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.fixture
def read_only() -> Elsewhere:
    """No device may write there: registration fails, as for a GPU that the NIC does not reach."""
    return Elsewhere(mmap.PROT_READ)


def pulled(nodes: Nodes, memory: RegionMemory, size: int = 64 * KIB) -> dict[int, bytes]:
    holder = nodes.make("holder", SLOTS, serve=True)
    data = holder.fill(range(SLOTS), size)
    holder.memory.range(7, 60_000, 1)[0] ^= 1
    puller = nodes.make("puller", memory=memory)
    drive = Driver(puller.connect(holder)).open()
    ended = drive.move([op_of(slot, size, local=(slot + 3) % SLOTS) for slot in range(SLOTS)])
    causes = [completion.cause for completion in ended.values()]
    assert causes == [None] * 7 + [Cause.CORRUPT]
    part = op_of(0, size, local=3, offset=100, size=5000)
    assert [one.cause for one in drive.move([part]).values()] == [None]
    return {(slot + 3) % SLOTS: data[slot] for slot in range(7)}


def test_by_address_bytes_land_where_they_shall(nodes: Nodes, writable: Elsewhere) -> None:
    memory = RegionMemory(writable.region(), FACTS, writable)
    wanted = pulled(nodes, memory)
    assert memory.staged_because == ""
    assert {slot: writable.payload(slot, 64 * KIB) for slot in wanted} == wanted
    assert set(writable.copied) == {"to_host"}, "only to be verified"


def test_what_the_device_cannot_register_is_staged(nodes: Nodes, read_only: Elsewhere) -> None:
    memory = RegionMemory(read_only.region(), FACTS, read_only)
    wanted = pulled(nodes, memory)
    assert "cuda memory cannot be registered, by its address" in memory.staged_because
    assert "staged through pinned host memory" in memory.staged_because
    assert {slot: read_only.payload(slot, 64 * KIB) for slot in wanted} == wanted
    assert set(read_only.copied) == {"from_host"}
    assert read_only.payload(2, 64 * KIB) == bytes(64 * KIB), "a damaged block goes nowhere"


def test_a_dmabuf_is_tried_first_and_the_address_next(nodes: Nodes, writable: Elsewhere) -> None:
    """A descriptor that is no dmabuf, and a device that knows none: both are refused."""
    with tempfile.TemporaryFile() as none:
        memory = RegionMemory(writable.region(dmabuf=none.fileno()), FACTS, writable)
        node = nodes.make("puller", memory=memory)
        assert [region.way for region in node.rdma.regions] == ["address"]
    with tempfile.TemporaryFile() as none:
        blind = Region(4096, SLOTS * SLOT, MemoryKind.CUDA, dmabuf=none.fileno())
        memory = RegionMemory(blind, FACTS, HostCopier())
        nodes.make("other", memory=memory)
        assert "as a dmabuf: " in memory.staged_because
        assert "by its address: " in memory.staged_because


def test_host_memory_is_not_staged_but_refused(nodes: Nodes, read_only: Elsewhere) -> None:
    node = nodes.make("n")
    region = Region(read_only.address, SLOTS * SLOT)
    with pytest.raises(ConfigError, match="host memory cannot be registered"):
        node.rdma.ports[0].register(region, remote_write=False)


def test_large_blocks_are_verified_part_by_part(nodes: Nodes) -> None:
    """Several segments: each is copied and hashed as it lands."""
    facts = SlabFacts(3 * MIB + 4096, SLOT_HEADER_BYTES, 2)
    payload = facts.slot_bytes - facts.header_bytes
    buffer = mmap.mmap(-1, 2 * payload)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    memory = RegionMemory(Region(address, 2 * payload), facts, HostCopier())
    holder = nodes.make("holder", 2, 3 * MIB, serve=True)
    data = holder.fill([0, 1], 3 * MIB)
    puller = nodes.make("puller", memory=memory)
    ended = Driver(puller.connect(holder)).open().move([op_of(0, 3 * MIB), op_of(1, 3 * MIB)])
    assert [one.cause for one in ended.values()] == [None, None]
    assert buffer[: 3 * MIB] == data[0]
    assert buffer[payload : payload + 3 * MIB] == data[1]
