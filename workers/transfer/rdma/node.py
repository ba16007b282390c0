"""A node's RDMA: its ports opened, its slab registered with each, once."""

from __future__ import annotations

import logging
from typing import Final

from workers.core.errors import ConfigError
from workers.core.rdma_choice import LockedMemory, check_locked_memory, plan_regions
from workers.core.transfer_stats import RdmaPortStats
from workers.pool.numa import memory_nodes
from workers.transfer.base import SlotMemory
from workers.transfer.rdma.devices import (
    PortFacts,
    hardware_counters,
    port_state,
    read_memlock,
    read_ports,
    receiver_not_ready,
    retries,
)
from workers.transfer.rdma.placement import place, slot_nodes
from workers.transfer.rdma.port import OpenPort, Registered
from workers.transfer.rdma.settings import RdmaSettings
from workers.transfer.rdma.verbs import load

MAX_PORTS: Final = 16
_log = logging.getLogger(__name__)


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
        self.regions: list[Registered] = []
        self.slot_nodes: list[int] = []
        """The memory node of each slot; empty where ports do not differ in how near they are."""
        wanted = usable_ports(self.settings)
        self.locked_memory = preflight(memory.num_bytes, len({port.device for port in wanted}))
        if not self.locked_memory.ok:
            raise ConfigError("rdma", memory.num_bytes, *_as_problem(self.locked_memory))
        verbs = load()
        self._place({port.numa_node for port in wanted})
        try:
            for facts in wanted:
                port = OpenPort(verbs, facts, self.settings)
                self.ports.append(port)
                for note in (port.gid.warning, *port.queues.notes):
                    if note:
                        _log.warning("%s: %s", port.name, note)
            self._register()
            self._look_where_slots_lie()
        except BaseException:
            self.close()
            raise

    def _place(self, port_nodes: set[int]) -> None:
        """Slots near ports: an equal part of the slab at the memory node of each. Before the
        registration, which makes pages stay where they are."""
        memory = self.memory
        if memory.region.address != memory.address:
            return  # memory of others, placed by them
        slot_bytes = memory.slab.slot_bytes
        regions = plan_regions(memory.num_bytes, slot_bytes, memory_nodes(), port_nodes)
        if regions and not place(memory.address, regions):
            _log.warning("the slab's pages cannot be placed near RDMA ports: mbind is refused")

    def _register(self) -> None:
        """With all ports in the same way: memory that one of them cannot take is staged for all."""
        memory = self.memory
        wanted = memory.region
        try:
            for port in self.ports:
                self.regions.append(port.register(wanted, remote_write=self.remote_write))
        except ConfigError as error:
            if not memory.stage(str(error)):
                raise
            _log.warning("%s memory is staged through the host's: %s", wanted.kind, error)
            self.regions.clear()
            self._register()

    def _look_where_slots_lie(self) -> None:
        known = {port.port.numa_node for port in self.ports} - {-1}
        memory = self.memory
        if known and len(memory_nodes()) > 1 and memory.region.address == memory.address:
            self.slot_nodes = slot_nodes(memory.address, memory.slab.slot_bytes, memory.num_slots)

    def stats(self) -> list[RdmaPortStats]:
        return [_stats(port) for port in list(self.ports)]

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


def check_host(settings: RdmaSettings, num_bytes: int) -> None:
    """Could a slab of so many bytes be registered here? ConfigError says what stands in the way.

    Opens nothing, so that it can be asked before there is a slab, and again.
    """
    wanted = usable_ports(settings)
    locked = preflight(num_bytes, len({port.device for port in wanted}))
    if not locked.ok:
        raise ConfigError("rdma", num_bytes, *_as_problem(locked))
    load()


def _as_problem(locked: LockedMemory) -> tuple[str, str]:
    problem, _, way_out = locked.statement.partition(". ")
    return problem, way_out


def _stats(port: OpenPort) -> RdmaPortStats:
    device, counted, queues = port.port.device, port.counters, port.queues
    shown = hardware_counters(device, port.number)
    return RdmaPortStats(
        port.name, port_state(device, port.number), port.gid.gid, port.gid.index, port.gid.type,
        port.gid.reason, port.active_mtu, queues.send_requests, queues.inline_bytes, queues.reads,
        port.port.numa_node, port.queue_pairs, counted.read_bytes, counted.written_bytes,
        counted.off_rail_bytes, counted.off_numa_bytes, counted.work_requests, counted.posts,
        counted.errors, receiver_not_ready(shown) - receiver_not_ready(port.hardware),
        retries(shown) - retries(port.hardware),
        [note for note in (port.gid.warning, *queues.notes) if note],
    )  # fmt: skip
