"""A node's RDMA: its ports opened, its slab registered with each, once."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from workers.core.errors import ConfigError
from workers.core.rdma_choice import LockedMemory, check_locked_memory
from workers.transfer.base import SlotMemory
from workers.transfer.rdma.devices import (
    PortFacts,
    hardware_counters,
    read_memlock,
    read_ports,
    receiver_not_ready,
)
from workers.transfer.rdma.port import OpenPort, Region
from workers.transfer.rdma.settings import RdmaSettings
from workers.transfer.rdma.verbs import load

MAX_PORTS: Final = 16
_log = logging.getLogger(__name__)


class PortStats(msgspec.Struct, frozen=True):
    """What is shown of one port."""

    name: str
    gid: str
    gid_index: int
    gid_reason: str
    active_mtu: int
    queue_depth: int
    queue_pairs: int
    receiver_not_ready: int
    counters: dict[str, int]
    notes: tuple[str, ...] = ()


class RdmaNode:
    """Shared by the node's transport and its server; `close` it after both.

    ConfigError: no active port, no pyverbs, or memory that cannot be registered; the text says
    what to do. `remote_write`: peers may push into reserved slots.
    """

    def __init__(
        self, memory: SlotMemory, settings: RdmaSettings | None = None, *, remote_write: bool = True
    ) -> None:
        self.memory = memory
        self.settings = settings or RdmaSettings()
        self.remote_write = remote_write
        self.ports: list[OpenPort] = []
        self.regions: list[Region] = []
        wanted = usable_ports(self.settings)
        self.locked_memory = preflight(memory.num_bytes, len({port.device for port in wanted}))
        if not self.locked_memory.ok:
            raise ConfigError("rdma", memory.num_bytes, self.locked_memory.statement, "")
        verbs = load()
        try:
            for facts in wanted:
                port = OpenPort(verbs, facts, self.settings)
                self.ports.append(port)
                self.regions.append(port.register(memory, remote_write=remote_write))
                for note in (port.gid.warning, *port.queues.notes):
                    if note:
                        _log.warning("%s: %s", port.name, note)
        except BaseException:
            self.close()
            raise

    def stats(self) -> list[PortStats]:
        return [_stats(port) for port in self.ports]

    @property
    def queue_pairs(self) -> int:
        """Of all ports, now."""
        return sum(port.queue_pairs for port in self.ports)

    def close(self) -> None:
        while self.ports:
            self.ports.pop().close()
        self.regions.clear()


def usable_ports(settings: RdmaSettings) -> list[PortFacts]:
    """ConfigError: there is none, or one that is named is missing or down."""
    found = read_ports()
    chosen = [port for port in found if settings.includes(port.device, port.name)]
    names = {name for port in found for name in (port.device, port.name)}
    for name in settings.devices:
        if name not in names:
            have = ", ".join(port.name for port in found) or "none"
            raise ConfigError("rdma.devices", name, "no such device", f"This host has: {have}.")
    active = [port for port in chosen if port.active]
    if not active:
        states = ", ".join(f"{port.name} {port.state}" for port in chosen) or "no devices"
        raise ConfigError(
            "rdma.devices", list(settings.devices), f"no active port ({states})",
            "Set the interface up and plug it in, or use tcp.",
        )  # fmt: skip
    return active[:MAX_PORTS]


def preflight(num_bytes: int, num_devices: int) -> LockedMemory:
    """May this process pin that much? Said before registration fails with 'out of memory'."""
    facts = read_memlock()
    return check_locked_memory(
        num_bytes, num_devices, facts.limit_bytes,
        privileged=facts.privileged, locked=facts.pinned_bytes,
    )  # fmt: skip


def _stats(port: OpenPort) -> PortStats:
    waits = receiver_not_ready(hardware_counters(port.port.device, port.number))
    return PortStats(
        port.name, port.gid.gid, port.gid.index, port.gid.reason, port.active_mtu,
        port.queues.send_requests, port.queue_pairs, waits, port.counters.as_dict(),
        port.queues.notes,
    )  # fmt: skip
