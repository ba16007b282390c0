"""Which GID, MTU, queue depths and rails an RDMA path uses, each with its reason. Pure.

The shell reads the tables (`workers.transfer.rdma.devices`) and acts on what is chosen here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from ipaddress import IPv6Address, ip_network
from typing import Final, NamedTuple

import msgspec

from workers.core.errors import ConfigError

MTU_SIZES: Final = (256, 512, 1024, 2048, 4096)
_LINK_LOCAL: Final = ip_network("fe80::/10")


class GidType(StrEnum):
    """As sysfs spells it, shortened."""

    ROCE_V2 = "roce_v2"
    ROCE_V1 = "roce_v1"
    INFINIBAND = "infiniband"


class GidEntry(msgspec.Struct, frozen=True):
    """One row of a port's GID table. `netdev` is "" where none is bound to it."""

    index: int
    gid: str  # in colons, any spelling that IPv6 allows
    type: GidType
    netdev: str = ""
    netdev_up: bool = True

    @property
    def address(self) -> IPv6Address:
        return IPv6Address(self.gid)

    @property
    def text(self) -> str:
        """As people know the address."""
        mapped = self.address.ipv4_mapped
        return str(mapped or self.address)


class GidChoice(msgspec.Struct, frozen=True):
    """`reason` always; `warning` where the choice may not work everywhere."""

    index: int
    gid: str
    type: GidType
    reason: str
    warning: str = ""


def choose_gid(
    entries: Iterable[GidEntry], local_addresses: Collection[str], index: int | None = None
) -> GidChoice:
    """The GID of a port to speak from. ConfigError: it has none, or not the one asked for.

    RoCEv2 comes before RoCEv1; then what is bound to an interface of this host that is up and has
    that address; then IPv4 before routable IPv6 before link-local. Ties go to the lowest index.
    `local_addresses`: of all interfaces that are up. `index` overrides all of it.
    """
    usable = [entry for entry in entries if int(entry.address)]
    if index is not None:
        return _asked_for(usable, index)
    if not usable:
        raise ConfigError(
            "rdma.gid", "none", "the port's GID table is empty",
            "Give its network interface an address and set it up (ip link set ... up).",
        )  # fmt: skip
    local = {_canonical(address) for address in local_addresses}
    best = min(usable, key=lambda entry: _rank(entry, local))
    return GidChoice(
        best.index, best.gid, best.type, _reason(best, usable, local), _warning(best, local)
    )


def _asked_for(usable: list[GidEntry], index: int) -> GidChoice:
    for entry in usable:
        if entry.index == index:
            return GidChoice(index, entry.gid, entry.type, f"{entry.text}: index {index} is set")
    have = ", ".join(f"{entry.index} ({entry.text}, {entry.type})" for entry in usable[:8])
    raise ConfigError(
        "rdma.gid_index", index, "the port has no such GID", f"Set one of: {have or 'none'}."
    )


def _rank(entry: GidEntry, local: set[IPv6Address]) -> tuple[bool, bool, int, int]:
    return (
        entry.type is GidType.ROCE_V1,
        not _bound(entry, local),
        _reach(entry),
        entry.index,
    )


def _bound(entry: GidEntry, local: set[IPv6Address]) -> bool:
    """InfiniBand's GIDs belong to no interface."""
    if entry.type is GidType.INFINIBAND:
        return True
    return entry.netdev_up and (not local or entry.address in local)


def _reach(entry: GidEntry) -> int:
    if entry.address.ipv4_mapped is not None:
        return 1 if entry.address.ipv4_mapped.is_link_local else 0
    return 3 if entry.address in _LINK_LOCAL else 2


def _reason(best: GidEntry, usable: list[GidEntry], local: set[IPv6Address]) -> str:
    kind = ("routable IPv4", "link-local IPv4", "routable IPv6", "link-local IPv6")[_reach(best)]
    text = f"{best.text}: {best.type}, {kind}"
    if best.netdev:
        text += f" of {best.netdev}"
    passed = [
        f"{entry.index} {entry.text} ({_shortcoming(entry, best, local)})"
        for entry in usable
        if entry.index < best.index
    ]
    return text + (f"; passed over: {', '.join(passed[:6])}" if passed else "")


def _shortcoming(entry: GidEntry, best: GidEntry, local: set[IPv6Address]) -> str:
    if entry.type is not best.type:
        return str(entry.type)
    if not entry.netdev_up:
        return f"{entry.netdev or 'its interface'} is down"
    if not _bound(entry, local):
        return "no interface here has that address"
    return "reaches less far"


def _warning(best: GidEntry, local: set[IPv6Address]) -> str:
    parts = []
    if best.type is GidType.ROCE_V1:
        parts.append("RoCEv1 crosses no router, and a peer must speak it too")
    if _reach(best) in (1, 3) and best.type is not GidType.INFINIBAND:
        parts.append(
            "link-local is all there is: only peers on the same wire are reached. Give "
            f"{best.netdev or 'the interface'} a routable address"
        )
    if not _bound(best, local):
        parts.append("no interface of this host that is up has that address")
    return "; ".join(parts)


def _canonical(address: str) -> IPv6Address:
    bare = address.partition("%")[0]
    return IPv6Address(bare if ":" in bare else f"::ffff:{bare}")


def check_types(mine: GidType, theirs: GidType, me: str, them: str) -> str:
    """Empty, or why packets of one would not be understood by the other (C05)."""
    if mine == theirs:
        return ""
    return (
        f"GID type is {mine} at {me} and {theirs} at {them}: each would drop the other's packets. "
        "Set rdma.gid_index on one of them to an entry of the other's type."
    )


# --- MTU ------------------------------------------------------------------------------------


class MtuChoice(msgspec.Struct, frozen=True):
    """`statement` is empty where both ends agree."""

    mtu: int
    statement: str = ""


def choose_mtu(mine: int, theirs: int, me: str = "this node", them: str = "peer") -> MtuChoice:
    """The smaller of both active MTUs, in bytes. With the larger, only small messages would pass."""
    for value in (mine, theirs):
        if value not in MTU_SIZES:
            raise ValueError(f"active MTU {value} is none of {MTU_SIZES}")
    if mine == theirs:
        return MtuChoice(mine)
    small, name = min((mine, me), (theirs, them))
    return MtuChoice(
        small,
        f"active MTU is {mine} at {me} and {theirs} at {them}: {small} is used. Raise the MTU of "
        f"{name}'s interface, and of what lies between, for full speed.",
    )


# --- queues ---------------------------------------------------------------------------------


class QueueWish(msgspec.Struct, frozen=True):
    """What is configured (R24)."""

    send_requests: int = 1024
    receive_requests: int = 1024
    inline_bytes: int = 256
    segments: int = 2  # of memory per work request: header and payload


class DeviceLimits(msgspec.Struct, frozen=True):
    """What the device says of itself."""

    max_qp_wr: int
    max_cqe: int
    max_sge: int
    max_qp_rd_atom: int
    max_inline: int = 256
    max_message: int = 1 << 30


class Queues(msgspec.Struct, frozen=True):
    """Effective values. The completion queue holds all that both queues can complete."""

    send_requests: int
    receive_requests: int
    inline_bytes: int
    segments: int
    completions: int
    reads: int  # that the device keeps outstanding, both ways
    notes: tuple[str, ...] = ()


MIN_REQUESTS: Final = 16
MAX_READS: Final = 16


def effective_queues(wish: QueueWish, limits: DeviceLimits) -> Queues:
    """Clamp what is wished to what the device gives, and say what was changed (C14)."""
    notes: list[str] = []

    def clamp(name: str, value: int, low: int, high: int) -> int:
        kept = max(low, min(value, high))
        if kept != value:
            notes.append(f"rdma.{name} = {value}: {kept} is used ({low} to {high} here)")
        return kept

    half = max(MIN_REQUESTS, limits.max_cqe // 2)
    top = max(MIN_REQUESTS, min(limits.max_qp_wr, half))
    send = clamp("send_requests", wish.send_requests, MIN_REQUESTS, top)
    receive = clamp("receive_requests", wish.receive_requests, MIN_REQUESTS, top)
    return Queues(
        send_requests=send,
        receive_requests=receive,
        inline_bytes=clamp("inline_bytes", wish.inline_bytes, 0, limits.max_inline),
        segments=clamp("segments", wish.segments, 1, limits.max_sge),
        completions=send + receive,
        reads=max(1, min(limits.max_qp_rd_atom, MAX_READS)),
        notes=tuple(notes),
    )


# --- rails ----------------------------------------------------------------------------------


class Port(msgspec.Struct, frozen=True):
    """One port of one device that takes part. `rail` names the network it hangs on."""

    device: str
    port: int
    rail: str = ""
    numa_node: int = -1
    gbps: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.device}/{self.port}"


class Rail(msgspec.Struct, frozen=True):
    """A pair of ports, by index into both lists. `off_rail`: they hang on different networks."""

    mine: int
    theirs: int
    off_rail: bool = False


class RailChoice(msgspec.Struct, frozen=True):
    rails: tuple[Rail, ...]
    warnings: tuple[str, ...] = ()


def leave_out(rails: Sequence[Rail], broken: Collection[tuple[int, int]]) -> tuple[Rail, ...]:
    """Without the pairs of ports that did not work of late; all of them where none would be left."""
    left = tuple(rail for rail in rails if (rail.mine, rail.theirs) not in broken)
    return left or tuple(rails)


def choose_rails(
    mine: Sequence[Port], theirs: Sequence[Port], peer: str, queue_pairs: int = 1
) -> RailChoice:
    """Each port of ours speaks to the peer's on the same rail; else to the next one, off the rail.

    `queue_pairs` for each pair of ports: a bonded interface needs several, since it sends all of a
    queue pair over one link (C20).

    Off-rail traffic crosses the spine: it is warned about and counted, never silent (C17).
    """
    if not mine or not theirs:
        side = "this node" if not mine else peer
        raise ConfigError(
            "rdma.devices", [], f"{side} has no active RDMA port", "Use tcp, or set a port up."
        )
    rails: list[Rail] = []
    warnings: list[str] = []
    for index, port in enumerate(mine):
        same = [i for i, other in enumerate(theirs) if _rail_of(other) == _rail_of(port)]
        chosen = same[0] if same else index % len(theirs)
        rails.append(Rail(index, chosen, off_rail=not same))
        if not same:
            warnings.append(
                f"{port.name} is on rail {_rail_of(port)}, where {peer} has no port: it speaks to "
                f"{theirs[chosen].name} on rail {_rail_of(theirs[chosen])}, off the rail"
            )
    return RailChoice(tuple(rails) * max(1, queue_pairs), tuple(warnings))


def _rail_of(port: Port) -> str:
    """Where none is configured, equal names are taken for equal rails."""
    return port.rail or port.name


# --- locked memory --------------------------------------------------------------------------


class LockedMemory(msgspec.Struct, frozen=True):
    """The preflight of memory registration (C06). `statement` says limit, need and way out."""

    ok: bool
    statement: str


def check_locked_memory(
    need_bytes: int, num_devices: int, limit_bytes: int | None, *, privileged: bool, locked: int = 0
) -> LockedMemory:
    """Each device pins the whole slab. `limit_bytes` None: unlimited; `privileged`: CAP_IPC_LOCK."""
    total = need_bytes * max(1, num_devices)
    what = f"registering the slab pins {_mib(total)}"
    if num_devices > 1:
        what += f" ({_mib(need_bytes)} for each of {num_devices} devices)"
    if privileged:
        return LockedMemory(True, f"{what}; this process may pin any amount (CAP_IPC_LOCK)")
    if limit_bytes is None:
        return LockedMemory(True, f"{what}; the locked-memory limit is unlimited")
    free = limit_bytes - locked
    if total <= free:
        return LockedMemory(True, f"{what}; the locked-memory limit is {_mib(limit_bytes)}")
    return LockedMemory(
        False,
        f"{what}, the locked-memory limit is {_mib(limit_bytes)}"
        + (f", of which {_mib(locked)} are in use" if locked else "")
        + ". Raise it for the agent: `ulimit -l unlimited` before its start, or LimitMEMLOCK=infinity "
        "in its systemd unit.",
    )


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // (1 << 20))} MiB"


# --- memory nodes ---------------------------------------------------------------------------


class Region(NamedTuple):
    """Bytes of the slab that shall lie at one memory node."""

    start: int
    num_bytes: int
    node: int


def plan_regions(
    num_bytes: int, unit: int, memory_nodes: Collection[int], port_nodes: Iterable[int]
) -> list[Region]:
    """The slab in equal parts of whole `unit`s, one for each memory node that has a port.

    Empty where placing makes no difference: one memory node, or a port whose node is unknown.
    """
    wanted = sorted(set(port_nodes))
    if len(memory_nodes) < 2 or not wanted or not set(wanted) <= set(memory_nodes):
        return []
    num_units = num_bytes // unit
    cuts = [num_units * index // len(wanted) * unit for index in range(len(wanted))]
    ends = [*cuts[1:], num_bytes]
    return [
        Region(start, end - start, node)
        for start, end, node in zip(cuts, ends, wanted, strict=True)
        if end > start
    ]


def node_of_pages(nodes: Iterable[int]) -> int:
    """Where a slot lies, by the nodes of some of its pages: -1 where it is spread or unknown."""
    found = set(nodes)
    node = found.pop() if len(found) == 1 else -1
    return max(-1, node)


def is_far(slot_node: int, port_node: int) -> bool:
    """Known to be at different memory nodes: the bytes cross the link between sockets."""
    return slot_node >= 0 and port_node >= 0 and slot_node != port_node


# --- striping -------------------------------------------------------------------------------

FAR_BYTES: Final = 4 << 20
"""A rail at another memory node than the slot takes over when the near ones are so much deeper in
work: crossing costs less than waiting longer than that."""


def pick_rail(
    outstanding: Sequence[int], speeds: Sequence[float], room: Sequence[int],
    far: Sequence[bool] = (),
) -> int:  # fmt: skip
    """The rail that will be free first, of those with room for a work request; -1 if none has.

    `outstanding` in bytes. Speeds of 0 are unknown and count as equal. `far`: at another memory
    node than the slot; empty where that is not known.
    """
    best, best_time = -1, 0.0
    for index, num_bytes in enumerate(outstanding):
        if not room[index]:
            continue
        waiting = num_bytes + (FAR_BYTES if far and far[index] else 0)
        time = waiting / (speeds[index] or 1.0)
        if best < 0 or time < best_time:
            best, best_time = index, time
    return best
