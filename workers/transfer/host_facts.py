"""What the doctor looks at on this machine: interfaces, RDMA ports, limits, pages, free space."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from workers.core.clock import Clock
from workers.core.doctor_messages import (
    HostFacts,
    HugePages,
    Interface,
    RdmaPort,
    Space,
    SpaceName,
)
from workers.transfer.rdma.devices import read_memlock, read_ports

MAX_INTERFACES: Final = 64
MAX_ADDRESSES: Final = 16
MAX_GIDS: Final = 64
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SHMEM: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_ADDRESSES: Final = (socket.AF_INET, socket.AF_INET6)


def read_host(clock: Clock, folders: Mapping[SpaceName, tuple[str, int]]) -> HostFacts:
    """`folders`: path and bytes that are still needed there, by "slab", "ssd", "logs".

    Some milliseconds; what cannot be read is left out.
    """
    memlock = read_memlock()
    return HostFacts(
        host_id=_text(_BOOT_ID),
        wall_seconds=clock.wall(),
        interfaces=_interfaces(),
        ports=_ports(),
        memlock_limit_bytes=memlock.limit_bytes,
        memlock_pinned_bytes=memlock.pinned_bytes,
        memlock_privileged=memlock.privileged,
        huge_pages=_huge_pages(),
        spaces=[space for name in folders if (space := _space(name, *folders[name])) is not None],
    )


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another; "" where there is no way. Resolves names."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: the kernel only looks the route up
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interfaces() -> list[Interface]:
    addresses = psutil.net_if_addrs()
    return [
        Interface(
            name,
            [
                entry.address.partition("%")[0]
                for entry in addresses.get(name, [])
                if entry.family in _ADDRESSES
            ][:MAX_ADDRESSES],
            stats.mtu,
            bool(stats.isup),
            max(0, stats.speed),
        )
        for name, stats in sorted(psutil.net_if_stats().items())
    ][:MAX_INTERFACES]


def _ports() -> list[RdmaPort]:
    return [
        RdmaPort(
            port.device, port.number, port.state, port.link_layer, port.gbps, port.numa_node,
            list(port.gids[:MAX_GIDS]),
        )
        for port in read_ports()
    ]  # fmt: skip


def _huge_pages() -> HugePages:
    fields = dict(line.split(":", 1) for line in _text(Path("/proc/meminfo")).splitlines())

    def number(name: str) -> int:
        words = fields.get(name, "0").split()
        return int(words[0]) if words else 0

    # "always within_size advise [never] deny force": the one in brackets is in force
    shmem = _text(_SHMEM).partition("[")[2].partition("]")[0]
    size = number("Hugepagesize") * 1024
    return HugePages(number("HugePages_Total"), number("HugePages_Free"), size, shmem)


def _space(name: SpaceName, path: str, needed_bytes: int) -> Space | None:
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a file that was made sparse still takes the rest
        facts = os.stat(path)
        if stat.S_ISREG(facts.st_mode):
            needed_bytes += facts.st_size - facts.st_blocks * 512
    return Space(name, os.fspath(path), usage.free, usage.total, max(0, needed_bytes))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
