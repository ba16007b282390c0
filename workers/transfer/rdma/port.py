"""One port that takes part: its device opened, the node's memory registered with it."""

from __future__ import annotations

import ctypes
import mmap
import threading
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import msgspec

from workers.core.errors import ConfigError
from workers.core.rdma_choice import (
    MTU_SIZES,
    DeviceLimits,
    GidChoice,
    Port,
    Queues,
    QueueWish,
    choose_gid,
    effective_queues,
)
from workers.transfer.base import MemoryKind, Region
from workers.transfer.rdma.devices import PortFacts, hardware_counters, local_addresses
from workers.transfer.rdma.queue_pair import QueuePair, as_os_error
from workers.transfer.rdma.settings import RdmaSettings
from workers.transfer.rdma.verbs import Verbs, close_once

_MAX_MESSAGE: Final = 8 << 20
"""Soft-RoCE's limit; hardware takes 1 GiB, but then a request holds up all behind it."""
_INLINE_TRIES: Final = (256, 128, 64, 0)


@dataclass(slots=True)
class PortCounters:
    """Of one port since the node's start."""

    read_bytes: int = 0
    written_bytes: int = 0
    off_rail_bytes: int = 0
    off_numa_bytes: int = 0
    work_requests: int = 0
    posts: int = 0
    errors: int = 0

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Registered(NamedTuple):
    """Registered memory, and by which way: "dmabuf" or "address".

    `address` is what work requests call its first byte.
    """

    address: int
    num_bytes: int
    lkey: int
    rkey: int
    way: str


class OpenPort:
    """Opened and registered once, for all peers. ConfigError: it cannot be used, and why."""

    def __init__(self, verbs: Verbs, facts: PortFacts, settings: RdmaSettings) -> None:
        self.verbs = verbs
        self.number = facts.number
        self.counters = PortCounters()
        self.hardware = hardware_counters(facts.device, facts.number)
        """The device's own when it was opened: what it counted before is not ours."""
        self.queue_pairs = 0
        self._count_lock = threading.Lock()  # servers' threads make queue pairs too
        self._objects: list[Any] = []
        self._facts = facts
        rail = settings.rails.get(facts.name, settings.rails.get(facts.device, ""))
        self.port = Port(facts.device, facts.number, rail, facts.numa_node, facts.gbps)
        index = settings.gid_index.get(facts.name, settings.gid_index.get(facts.device))
        self.gid: GidChoice = choose_gid(facts.gids, local_addresses(), index)
        try:
            self._open(settings)
        except BaseException:
            close_once(self._objects)
            raise

    @property
    def name(self) -> str:
        return self.port.name

    def _open(self, settings: RdmaSettings) -> None:
        verbs = self.verbs
        try:
            self.context = verbs.device.Context(name=self._facts.device)
            self._objects.append(self.context)
            attributes = self.context.query_port(self.number)
            device = self.context.query_device()
            self.pd = verbs.pd.PD(self.context)
            self._objects.append(self.pd)
        except verbs.error as error:
            raise ConfigError(
                "rdma.devices", self._facts.device, f"cannot be opened: {error}",
                "The agent needs read and write access to /dev/infiniband/uverbs*.",
            ) from error  # fmt: skip
        self.lid = int(attributes.lid)
        active = MTU_SIZES[int(attributes.active_mtu) - 1]
        self.active_mtu = min(active, settings.mtu) if settings.mtu else active
        self.limits = DeviceLimits(
            max_qp_wr=int(device.max_qp_wr),
            max_cqe=int(device.max_cqe),
            max_sge=int(device.max_sge),
            max_qp_rd_atom=int(device.max_qp_rd_atom),
            max_message=_MAX_MESSAGE,
        )
        self.queues = effective_queues(settings.queues, self.limits)

    def register(self, wanted: Region, *, remote_write: bool) -> Registered:
        """The node's slots: read by peers, and written where pushes are taken. ConfigError."""
        local, write, read = (
            self.verbs.constant(f"IBV_ACCESS_{name}")
            for name in ("LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ")
        )
        access = local | read | (write if remote_write else 0)
        errors: list[str] = []
        if wanted.dmabuf >= 0:
            try:
                return self._register_dmabuf(wanted, access)
            except (self.verbs.error, AttributeError, OSError) as error:
                errors.append(f"as a dmabuf: {error}")
        try:
            return self.register_raw(wanted.address, wanted.num_bytes, access)
        except self.verbs.error as error:
            errors.append(f"by its address: {error}")
        raise ConfigError(
            "rdma", self.name, f"{wanted.num_bytes} bytes of {wanted.kind} memory cannot be "
            f"registered, {'; '.join(errors)}", _registration_help(wanted.kind),
        )  # fmt: skip

    def register_raw(self, address: int, num_bytes: int, access: int) -> Registered:
        region = self.verbs.mr.MR(self.pd, num_bytes, access, address=address)
        self._objects.append(region)
        return Registered(address, num_bytes, int(region.lkey), int(region.rkey), "address")

    def _register_dmabuf(self, wanted: Region, access: int) -> Registered:
        """Its io addresses are those of the region, as with the other way."""
        verbs = self.verbs
        region = verbs.mr.DmaBufMR(
            self.pd, wanted.num_bytes, access, dmabuf=wanted.dmabuf, offset=wanted.dmabuf_offset
        )
        self._objects.append(region)
        # pyverbs gives these regions addresses that begin at their offset
        address = wanted.dmabuf_offset
        return Registered(address, wanted.num_bytes, int(region.lkey), int(region.rkey), "dmabuf")

    def queue_pair(self, queues: Queues, *, remote_read: bool, remote_write: bool) -> QueuePair:
        """OSError: the device gives no more."""
        tries = [size for size in _INLINE_TRIES if size <= queues.inline_bytes] or [0]
        for inline in tries:
            try:
                wanted = _with_inline(queues, inline)
                return QueuePair(self, wanted, remote_read=remote_read, remote_write=remote_write)
            except self.verbs.error as error:
                if inline == tries[-1]:
                    raise as_os_error(error) from error
        raise AssertionError("unreachable: the last try returns or raises")

    def count(self, change: int) -> None:
        """A queue pair was made or closed."""
        with self._count_lock:
            self.queue_pairs += change

    def control_queues(self, depth: int) -> Queues:
        """Small ones, for the side that only answers."""
        return effective_queues(QueueWish(depth, depth, self.queues.inline_bytes, 1), self.limits)

    def close(self) -> None:
        """After its queue pairs. Idempotent."""
        close_once(self._objects)


class Scratch:
    """Small registered buffers of one user of a port: headers that are read, control messages."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, num_bytes)
        self.view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._regions: dict[int, Any] = {}

    def register(self, port: OpenPort) -> int:
        """Its lkey with that port's device."""
        region = self._regions.get(id(port))
        if region is None:
            verbs = port.verbs
            access = verbs.constant("IBV_ACCESS_LOCAL_WRITE")
            try:
                region = verbs.mr.MR(port.pd, len(self.memory), access, address=self.address)
            except verbs.error as error:
                raise as_os_error(error) from error
            self._regions[id(port)] = region
        return int(region.lkey)

    def close(self) -> None:
        """After the queue pairs that use it."""
        while self._regions:
            self._regions.popitem()[1].close()


def _registration_help(kind: MemoryKind) -> str:
    if kind is not MemoryKind.HOST:
        return (
            "The device cannot expose its memory to this NIC (nvidia-peermem or dma-buf is "
            "missing): blocks are staged through pinned host memory instead."
        )
    return "Raise the locked-memory limit: `ulimit -l unlimited`, or LimitMEMLOCK=infinity."


def _with_inline(queues: Queues, inline: int) -> Queues:
    return msgspec.structs.replace(queues, inline_bytes=inline)
