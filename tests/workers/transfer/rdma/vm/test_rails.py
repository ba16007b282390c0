"""Several queue pairs and several devices to one peer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from rdma_nodes import KIB, MIB, Driver, Nodes, op_of

from workers.transfer.rdma.devices import read_ports
from workers.transfer.rdma.node import RdmaNode
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
