"""RDMA ports of this host, from sysfs: no library, no privilege. For the choice and for the doctor."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import psutil

from workers.core.rdma_choice import GidEntry, GidType

SYSFS: Final = Path("/sys/class/infiniband")
_TYPES: Final = {
    "RoCE v2": GidType.ROCE_V2,
    "IB/RoCE v1": GidType.ROCE_V1,
    "RoCE v1": GidType.ROCE_V1,
}
_CAP_IPC_LOCK: Final = 14
_NO_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"
_GAP: Final = 64
"""So many empty rows end a GID table: drivers fill it from the front, and it may have 1024."""


class PortFacts(msgspec.Struct, frozen=True):
    """One port as it is now. `gbps` 0 and `numa_node` -1 mean unknown."""

    device: str
    number: int
    state: str  # "ACTIVE", "DOWN", ...
    link_layer: str  # "Ethernet", "InfiniBand"
    gbps: float
    numa_node: int
    gids: tuple[GidEntry, ...]

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


def read_ports(root: Path = SYSFS) -> list[PortFacts]:
    """All ports, in the order of their names; empty where there is no RDMA."""
    if not root.is_dir():
        return []
    return [
        _read_port(device, folder)
        for device in sorted(root.iterdir())
        for folder in sorted((device / "ports").glob("*"), key=lambda path: int(path.name))
    ]


def port_state(device: str, number: int, root: Path = SYSFS) -> str:
    """ "ACTIVE", "DOWN", ...; "" where there is no such port any more."""
    return _state(root / device / "ports" / str(number))


def _state(folder: Path) -> str:
    return _text(folder / "state").rpartition(":")[2].strip()


def _read_port(device: Path, folder: Path) -> PortFacts:
    layer = _text(folder / "link_layer")
    numa = _text(device / "device" / "numa_node")
    return PortFacts(
        device=device.name,
        number=int(folder.name),
        state=_state(folder),
        link_layer=layer,
        gbps=_gbps(_text(folder / "rate")),
        numa_node=int(numa) if numa else -1,
        gids=tuple(_gids(folder, layer)),
    )


def _gids(folder: Path, layer: str) -> Iterator[GidEntry]:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    last = 0
    for path in sorted((folder / "gids").glob("*"), key=lambda path: int(path.name)):
        index = int(path.name)
        gid = _text(path)
        if not gid or gid == _NO_GID:
            if index - last > _GAP:
                return
            continue
        last = index
        kind = _TYPES.get(_text(folder / "gid_attrs" / "types" / path.name), GidType.ROCE_V1)
        netdev = _text(folder / "gid_attrs" / "ndevs" / path.name)
        yield GidEntry(
            index, gid, GidType.INFINIBAND if layer == "InfiniBand" else kind, netdev,
            not netdev or netdev in up,
        )  # fmt: skip


def local_addresses() -> list[str]:
    """Of interfaces that are up."""
    stats = psutil.net_if_stats()
    return [
        entry.address.partition("%")[0]
        for name, entries in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def hardware_counters(device: str, port: int, root: Path = SYSFS) -> dict[str, int]:
    """What the device counts itself: retries, receivers not ready, packets out of order, ..."""
    folder = root / device / "ports" / str(port)
    found: dict[str, int] = {}
    for group in ("counters", "hw_counters"):
        for path in sorted((folder / group).glob("*")):
            with contextlib.suppress(ValueError):
                found[path.name] = int(_text(path) or "x")
    return found


_NOT_READY: Final = ("rnr_nak_retry_err", "rcvd_rnr_err", "rnr_naks_recvd", "Recv RNR Naks")
_RETRIES: Final = (
    "local_ack_timeout_err", "packet_seq_err", "implied_nak_seq_err",  # mlx5
    "completer_retry_err", "rcvd_seq_err", "retry_exceeded_err",  # rxe
    "seq_err_naks_rcvd", "to_retransmits",  # bnxt
)  # fmt: skip


def receiver_not_ready(counters: dict[str, int]) -> int:
    """How often a receiver was not ready, under the names that drivers give it."""
    return sum(counters.get(name, 0) for name in _NOT_READY)


def retries(counters: dict[str, int]) -> int:
    """How often something had to be sent again: acknowledgements late, packets lost or reordered."""
    return sum(counters.get(name, 0) for name in _RETRIES)


class MemlockFacts(msgspec.Struct, frozen=True):
    """`limit_bytes` None: unlimited."""

    limit_bytes: int | None
    pinned_bytes: int
    privileged: bool


def read_memlock() -> MemlockFacts:
    """Of this process. Registered memory counts as pinned (VmPin), not as locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    pinned = int(fields.get("VmPin", "0 kB").split()[0]) * 1024
    capabilities = int(fields.get("CapEff", "0").strip(), 16)
    return MemlockFacts(
        None if soft == resource.RLIM_INFINITY else soft,
        pinned,
        bool(capabilities >> _CAP_IPC_LOCK & 1),
    )


def device_nodes_writable() -> bool:
    """The agent may open devices: without udev their nodes are root's alone."""
    nodes = list(Path("/dev/infiniband").glob("uverbs*"))
    return bool(nodes) and all(os.access(node, os.R_OK | os.W_OK) for node in nodes)


def _gbps(rate: str) -> float:
    """From "100 Gb/sec (4X EDR)"."""
    words = rate.split()
    return float(words[0]) if words and words[0].replace(".", "", 1).isdigit() else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # empty rows of a GID table cannot be read
        return ""
