"""What the doctor asks agents: facts of a node, and a bounded probe of one peer.

    control plane -- Probe(holder) --> agent of the destination -- PrepareProbe --> agent of the holder
                                       pulls scratch blocks over each transport <-- ScratchSlots

A probe moves at most `max_bytes` a transport, in the class `batch`, between slots that hold nothing
and that nobody can look up. It is asked for once and then asked after: `Probe` and `GetProbe` are
both answered at once by `ProbeReport`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from workers.core.rdma_choice import GidEntry
from workers.core.stats_messages import NamespaceInfo
from workers.core.transfer_messages import HolderRef
from workers.core.transfer_stats import LinkStats, RdmaPortStats, RdmaRailStats

MAX_PROBE_BYTES: Final = 32 << 20
DEFAULT_PROBE_BYTES: Final = 8 << 20


class Interface(msgspec.Struct, frozen=True):
    """A network interface. `mbps` 0: its driver does not tell a speed."""

    name: str
    addresses: list[str]
    mtu: int
    up: bool
    mbps: int = 0


class RdmaPort(msgspec.Struct, frozen=True):
    """A port as sysfs shows it. `gbps` 0 and `numa_node` -1: unknown."""

    device: str
    number: int
    state: str  # "ACTIVE", "DOWN", ...
    link_layer: str
    gbps: float
    numa_node: int
    gids: list[GidEntry]

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"


class HugePages(msgspec.Struct, frozen=True):
    """Reserved pages, and whether shared memory gets transparent ones ("never", "advise", ...)."""

    total: int
    free: int
    page_bytes: int
    shmem: str = ""


SpaceName = Literal["slab", "ssd", "logs"]


class Space(msgspec.Struct, frozen=True):
    """A place where the node writes. `needed_bytes`: what it will still take there."""

    name: SpaceName
    path: str
    free_bytes: int
    total_bytes: int
    needed_bytes: int = 0


class HostFacts(msgspec.Struct, frozen=True):
    """What can be known of a machine without an agent. `memlock_limit_bytes` None: unlimited."""

    host_id: str  # of this boot: equal on one machine
    wall_seconds: float  # since the epoch, as its clock says
    interfaces: list[Interface]
    ports: list[RdmaPort]
    memlock_limit_bytes: int | None
    memlock_pinned_bytes: int
    memlock_privileged: bool
    huge_pages: HugePages
    spaces: list[Space]


class GetNodeFacts(msgspec.Struct, tag=True, frozen=True):
    """Answered by `NodeFacts`. `logs`: a folder to measure the free space of; "" = none."""

    logs: str = ""


class NodeFacts(msgspec.Struct, tag=True, frozen=True):
    """A node as its agent finds it now. `block_bytes` 0: no worker has joined yet."""

    node_id: str
    incarnation: int
    host: HostFacts
    slab_bytes: int
    block_tokens: int
    block_bytes: int
    has_secret: bool
    transports: list[str]  # as configured
    addresses: dict[str, str]  # where peers reach its slots, by transport
    endpoint: str  # where other nodes' agents reach it; "" = nowhere
    transfer_problem: str = ""
    namespaces: list[NamespaceInfo] = []
    links: list[LinkStats] = []
    alarms: list[str] = []
    not_ready: str = ""  # why it cannot move blocks in the way that it was told to
    rdma_problem: str = ""  # why RDMA is not had although the settings name it
    rdma_ports: list[RdmaPortStats] = []
    slots_by_memory_node: dict[int, int] = {}  # -1: spread over several; {}: it makes no difference


class Probe(msgspec.Struct, tag=True, frozen=True):
    """Pull scratch blocks from `holder` by each transport (or by these) and say how it went."""

    holder: HolderRef
    transports: list[str] = []
    max_bytes: int = DEFAULT_PROBE_BYTES


class GetProbe(msgspec.Struct, tag=True, frozen=True):
    """How a probe of this node stands."""

    probe_id: str


class TransportProbe(msgspec.Struct, frozen=True):
    """One transport's result. `small_seconds` is the median of some transfers of `small_bytes`.

    `offered` False: the holder has no address for it. Each error is empty where that part went well.
    `rails`: of rdma, the pairs of ports that were used, and those that did not work.
    """

    transport: str
    offered: bool = True
    small_bytes: int = 0
    small_seconds: float | None = None
    small_error: str = ""
    large_bytes: int = 0
    large_seconds: float | None = None
    large_error: str = ""
    window_ops: int = 0  # effective queue depth
    rails: list[RdmaRailStats] = []
    cap_bytes_per_second: float = 0.0  # that the `transfer` policy sets; 0: none

    @property
    def bytes_per_second(self) -> float | None:
        if not self.large_seconds:
            return None
        rate = self.large_bytes / self.large_seconds  # a burst may be quicker than a cap
        return min(rate, self.cap_bytes_per_second or rate)


class ProbeReport(msgspec.Struct, tag=True, frozen=True):
    """`source` is the holder: blocks go from it to `destination`. `error`: no transport was tried.

    `clock_offset_seconds`: the holder's clock less ours, give or take half of `control_seconds`.
    """

    probe_id: str
    state: Literal["running", "done"]
    source: str
    destination: str
    control_seconds: float | None = None
    clock_offset_seconds: float | None = None
    local_address: str = ""  # of ours, that leads to the holder
    error: str = ""
    transports: list[TransportProbe] = []


class PrepareProbe(msgspec.Struct, tag=True, frozen=True):
    """From another agent: lend scratch blocks to be read. They rest after `EndProbe` or 30 s."""

    num_bytes: int


class ScratchSlots(msgspec.Struct, tag=True, frozen=True):
    """Slots (with generations) that hold one whole block each, by these keys."""

    slots: list[tuple[int, int]]
    keys: list[bytes]
    block_bytes: int
    wall_seconds: float


class EndProbe(msgspec.Struct, tag=True, frozen=True):
    """What this connection was lent is not read any more."""


DoctorRequests = GetNodeFacts | Probe | GetProbe | PrepareProbe | EndProbe
DoctorReplies = NodeFacts | ProbeReport | ScratchSlots
