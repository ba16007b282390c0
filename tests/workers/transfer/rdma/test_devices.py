"""Ports as sysfs shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workers.core.errors import ConfigError
from workers.core.rdma_choice import GidType
from workers.transfer.rdma import node
from workers.transfer.rdma.devices import (
    hardware_counters,
    read_memlock,
    read_ports,
    receiver_not_ready,
)
from workers.transfer.rdma.settings import RdmaSettings
from workers.transfer.rdma.status import meaning_of

ROOT = Path(__file__).parents[4]
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def make_port(root: Path, device: str, number: int = 1, state: str = "4: ACTIVE") -> Path:
    port = root / device / "ports" / str(number)
    write(port / "state", state)
    write(port / "link_layer", "Ethernet")
    write(port / "rate", "200 Gb/sec (4X HDR)")
    write(root / device / "device" / "numa_node", "1")
    return port


def make_gid(port: Path, index: int, gid: str, kind: str = "", netdev: str = "") -> None:
    write(port / "gids" / str(index), gid)
    if kind:
        write(port / "gid_attrs" / "types" / str(index), kind)
    if netdev:
        write(port / "gid_attrs" / "ndevs" / str(index), netdev)


def test_a_port_is_read(tmp_path: Path) -> None:
    port = make_port(tmp_path, "mlx5_0")
    make_gid(port, 0, "fe80:0000:0000:0000:0001:0002:0003:0004", "IB/RoCE v1", "lo")
    make_gid(port, 1, EMPTY)
    make_gid(port, 3, "0000:0000:0000:0000:0000:ffff:0a00:0007", "RoCE v2", "nosuchdev0")
    write(port / "counters" / "port_rcv_data", "12")
    write(port / "hw_counters" / "rnr_nak_retry_err", "3")
    write(port / "hw_counters" / "lifespan", "N/A")
    (facts,) = read_ports(tmp_path)
    assert (facts.name, facts.active, facts.gbps, facts.numa_node) == ("mlx5_0/1", True, 200.0, 1)
    assert [(gid.index, gid.type, gid.netdev_up) for gid in facts.gids] == [
        (0, GidType.ROCE_V1, True),
        (3, GidType.ROCE_V2, False),
    ]
    assert facts.gids[1].text == "10.0.0.7"
    counters = hardware_counters("mlx5_0", 1, tmp_path)
    assert counters == {"port_rcv_data": 12, "rnr_nak_retry_err": 3}
    assert receiver_not_ready(counters) == 3


def test_no_devices(tmp_path: Path) -> None:
    assert read_ports(tmp_path / "none") == []


class TestUsablePorts:
    @pytest.fixture(autouse=True)
    def ports(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_port(tmp_path, "mlx5_0")
        make_port(tmp_path, "mlx5_1", 1, "1: DOWN")
        make_port(tmp_path, "mlx5_1", 2)
        monkeypatch.setattr(node, "read_ports", lambda: read_ports(tmp_path))

    def test_all_that_are_active(self) -> None:
        names = [port.name for port in node.usable_ports(RdmaSettings())]
        assert names == ["mlx5_0/1", "mlx5_1/2"]

    def test_by_name(self) -> None:
        assert [p.name for p in node.usable_ports(RdmaSettings(devices=("mlx5_1",)))] == [
            "mlx5_1/2"
        ]
        assert [p.name for p in node.usable_ports(RdmaSettings(devices=("mlx5_0/1",)))] == [
            "mlx5_0/1"
        ]

    def test_a_name_that_is_none(self) -> None:
        with pytest.raises(ConfigError, match=r"'mlx5_9'.*mlx5_0/1, mlx5_1/1, mlx5_1/2"):
            node.usable_ports(RdmaSettings(devices=("mlx5_9",)))

    def test_a_port_that_is_down(self) -> None:
        with pytest.raises(ConfigError, match=r"no active port \(mlx5_1/1 DOWN\)"):
            node.usable_ports(RdmaSettings(devices=("mlx5_1/1",)))


def test_c06_locked_memory_of_a_process_without_privilege() -> None:
    code = """
import os, resource
from workers.transfer.rdma.node import preflight
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
if os.getuid() == 0:
    os.setuid(65534)
print(preflight(64 << 20, 2))
"""
    reply = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "ok=False" in reply.stdout
    assert "pins 128 MiB (64 MiB for each of 2 devices)" in reply.stdout
    assert "limit is 8 MiB" in reply.stdout


def test_locked_memory_is_read() -> None:
    facts = read_memlock()
    assert facts.pinned_bytes >= 0


def test_statuses_have_words() -> None:
    assert meaning_of(12).name == "RETRY_EXC_ERR"
    assert "does not answer" in meaning_of(12).text
    assert "MTU" in meaning_of(9).text
    assert "222" in meaning_of(222).name
