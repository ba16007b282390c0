"""Several queue pairs and several devices to one peer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rdma_nodes import KIB, MIB, Driver, Node, Nodes, make_memory, op_of

from workers.core.rdma_choice import plan_regions
from workers.pool.numa import memory_nodes
from workers.transfer.rdma.devices import read_ports
from workers.transfer.rdma.node import RdmaNode
from workers.transfer.rdma.placement import place, slot_nodes
from workers.transfer.rdma.settings import RdmaSettings
from workers.transfer.rdma.transport import RdmaEndpoint

BLOCK = 64 * KIB


@pytest.fixture
def second_device() -> str:
    """On the loopback interface, a rail of its own. It stays: to delete a device that is open
    waits for ever."""
    if not Path("/sys/class/infiniband/rxelo").exists():
        subprocess.run(
            ["rdma", *["link", "add", "rxelo", "type", "rxe", "netdev", "lo"]], check=True
        )
    return "rxelo"


def test_c20_bytes_spread_over_queue_pairs(nodes: Nodes) -> None:
    puller, holder = nodes.pair(settings=RdmaSettings(devices=("rxe0",), queue_pairs=2))
    data = holder.fill(range(64), BLOCK)
    drive = Driver(puller.connect(holder)).open()
    ended = drive.move([op_of(slot, BLOCK) for slot in range(64)])
    assert all(completion.cause is None for completion in ended.values())
    assert all(puller.memory.range(slot, 0, BLOCK) == data[slot] for slot in range(64))
    assert isinstance(drive.endpoint, RdmaEndpoint)
    moved = [rail.moved_bytes for rail in drive.endpoint.rails]
    assert sum(moved) == 64 * BLOCK
    assert min(moved) > 16 * BLOCK, moved


def test_a_large_block_spreads_over_devices(nodes: Nodes, second_device: str) -> None:
    settings = RdmaSettings(devices=("rxe0", second_device))
    puller, holder = nodes.pair(num_slots=4, payload=8 * MIB, settings=settings)
    data = holder.fill(range(4), 8 * MIB)
    drive = Driver(puller.connect(holder)).open()
    ended = drive.move([op_of(slot, 8 * MIB) for slot in range(4)])
    assert all(completion.cause is None for completion in ended.values()), ended
    assert all(puller.memory.range(slot, 0, 8 * MIB) == data[slot] for slot in range(4))
    shown = {port.name: port for port in puller.rdma.stats()}
    assert set(shown) == {"rxe0/1", "rxelo/1"}
    assert sum(port.read_bytes_total for port in shown.values()) == 32 * MIB
    assert min(port.read_bytes_total for port in shown.values()) >= 8 * MIB, shown
    assert all(port.off_rail_bytes_total == 0 for port in shown.values())


@pytest.fixture
def link() -> Iterator[Callable[[str], None]]:
    """Sets the interface under rxe0 up or down."""

    def put(state: str) -> None:
        subprocess.run(["ip", "link", "set", os.environ["RDMA_VM_LINK"], state], check=True)

    yield put
    put("up")


class TestC12:
    """Of two devices one is cut off."""

    NO_PATH = "puller cannot reach holder over rxe0/1 (to rxe0/1)"

    def pair(self, nodes: Nodes, second: str) -> tuple[Node, Node, dict[int, bytes]]:
        puller, holder = nodes.pair(settings=RdmaSettings(devices=("rxe0", second)))
        return puller, holder, holder.fill(range(64), BLOCK)

    def works_over(self, device: str, puller: Node, holder: Node, data: dict[int, bytes]) -> None:
        drive = Driver(puller.connect(holder)).open()
        assert isinstance(drive.endpoint, RdmaEndpoint)
        assert [rail.port.name for rail in drive.endpoint.rails] == [f"{device}/1"]
        ended = drive.move([op_of(slot, BLOCK) for slot in range(64)])
        assert all(completion.cause is None for completion in ended.values()), ended
        assert all(puller.memory.range(slot, 0, BLOCK) == data[slot] for slot in range(64))
        (broken,) = [rail for rail in puller.transport.rails() if rail.error]
        assert self.NO_PATH in broken.error
        assert (broken.peer, broken.port, broken.peer_port) == ("holder", "rxe0/1", "rxe0/1")

    def test_c12_it_is_left_out_at_the_join(
        self, nodes: Nodes, second_device: str, link: Callable[[str], None]
    ) -> None:
        puller, holder, data = self.pair(nodes, second_device)
        link("down")
        self.works_over(second_device, puller, holder, data)

    def test_c12_it_is_named_when_it_breaks_and_passed_over_then(
        self, nodes: Nodes, second_device: str, link: Callable[[str], None]
    ) -> None:
        puller, holder, data = self.pair(nodes, second_device)
        drive = Driver(puller.connect(holder)).open()
        link("down")
        drive.move([op_of(slot, BLOCK) for slot in range(64)])
        assert drive.down is not None
        assert self.NO_PATH in drive.down.text
        self.works_over(second_device, puller, holder, data)


def test_c17_traffic_off_the_rail_is_warned_about_and_counted(nodes: Nodes) -> None:
    ours = RdmaSettings(devices=("rxe0",), rails={"rxe0": "red"})
    theirs = RdmaSettings(devices=("rxe0",), rails={"rxe0": "blue"})
    puller = nodes.make("puller", settings=ours)
    holder = nodes.make("holder", serve=True, settings=theirs)
    holder.fill([0], BLOCK)
    drive = Driver(puller.connect(holder)).open()
    assert isinstance(drive.endpoint, RdmaEndpoint)
    assert "rail red, where holder has no port" in drive.endpoint.notes[0]
    drive.move([op_of(0, BLOCK)])
    assert puller.rdma.stats()[0].off_rail_bytes_total == BLOCK


def test_slots_lie_near_ports(nodes: Nodes) -> None:
    """The VM has two memory nodes; Soft-RoCE's ports are at none, so they are told theirs here."""
    if len(memory_nodes()) < 2:
        pytest.skip("needs two memory nodes")
    memory = make_memory(64, BLOCK)
    regions = plan_regions(memory.num_bytes, memory.slab.slot_bytes, memory_nodes(), [0, 1])
    assert place(memory.address, regions)
    for slot in range(64):
        memory.slab.payload(slot)[:] = bytes(memory.payload_bytes)
    found = slot_nodes(memory.address, memory.slab.slot_bytes, 64)
    assert set(found[:31]) == {0}
    assert set(found[33:]) == {1}, "but for the slot at the border, whose pages both share"
    node = nodes.make("n", memory=memory)
    assert node.rdma.slot_nodes == [], "a port whose memory node is unknown makes no difference"


def test_what_is_shown_of_a_port(nodes: Nodes) -> None:
    node = nodes.make("n")
    assert isinstance(node.rdma, RdmaNode)
    (port,) = node.rdma.stats()
    assert (port.name, port.active_mtu, port.queue_depth, port.queue_pairs) == (
        "rxe0/1",
        4096,
        1024,
        0,
    )
    assert port.gid.endswith("0a63:0001")
    assert "10.99.0.1: roce_v2, routable IPv4 of dummy0; passed over: 0 fe80" in port.gid_reason
    assert node.rdma.locked_memory.ok
    assert read_ports()[0].active
