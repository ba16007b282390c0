"""The doctor's checks of RDMA in use: a node's ports, and the paths between two nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from workers.core import numbers
from workers.core.doctor_messages import HostFacts, NodeFacts, RdmaPort, TransportProbe
from workers.core.doctor_verdict import Check
from workers.core.errors import ConfigError
from workers.core.rdma_choice import (
    MTU_SIZES,
    GidType,
    Port,
    check_types,
    choose_gid,
    choose_mtu,
    choose_rails,
)
from workers.core.transfer_stats import RdmaPortStats

ROCE_HEADERS: Final = 80
"""Bytes of a RoCEv2 packet beside its payload, rounded up as drivers do."""
RETRIES_SHARE: Final = 0.001
"""Of work requests: a network without loss needs none, a few come with any outage."""
FEW: Final = 10
MAX_RAILS: Final = 64


def split_problem(text: str) -> tuple[str, str]:
    """A problem and the way out, of a text that has both."""
    problem, stop, way_out = text.partition(". ")
    return problem, way_out if stop else ""


def rdma_checks(facts: NodeFacts) -> Iterator[Check]:
    """What the agent found when it opened its ports, and what they have counted since."""
    if facts.rdma_problem and not facts.not_ready:
        problem, way_out = split_problem(facts.rdma_problem)
        yield Check(
            "rdma", "warn", f"not had, blocks go by {_others(facts)}: {problem}",
            "had where it is named", way_out or "Leave rdma out of the agent's --transports.",
        )  # fmt: skip
    for port in facts.rdma_ports:
        yield Check(
            f"rdma.queues {port.name}", "ok",
            f"{port.queue_depth} work requests, {port.inline_bytes} bytes inline, {port.reads} reads "
            f"at once, {port.queue_pairs} queue pairs",
            "what the device gives, up to 1024 and 256 bytes",
        )  # fmt: skip
        yield _retries(port)
        yield _not_ready(port)
        yield from _rails_of(port)
    yield from _memory_nodes(facts)


def _others(facts: NodeFacts) -> str:
    return " and ".join(name for name in facts.transports if name != "rdma") or "nothing"


def _retries(port: RdmaPortStats) -> Check:
    name, value = (
        f"rdma.retries {port.name}",
        f"{numbers.count(port.retries_total)} since the start",
    )
    if port.retries_total <= max(FEW, RETRIES_SHARE * port.work_requests_total):
        return Check(name, "ok", value, "hardly any")
    return Check(
        name, "warn", value, "hardly any",
        "Packets are lost or out of order: see PFC and ECN on the switch, the cable, ethtool -S.",
    )  # fmt: skip


def _not_ready(port: RdmaPortStats) -> Check:
    """C19: waiting for a receiver is no failure, but it is seen."""
    name = f"rdma.receiver_not_ready {port.name}"
    value = f"{numbers.count(port.receiver_not_ready_total)} since the start"
    if port.receiver_not_ready_total <= max(FEW, RETRIES_SHARE * port.work_requests_total):
        return Check(name, "ok", value, "hardly any")
    return Check(
        name, "warn", value, "hardly any",
        "A peer posts its receive buffers late: its agent is short of CPU. See load there.",
    )  # fmt: skip


def _rails_of(port: RdmaPortStats) -> Iterator[Check]:
    """C17: off-rail traffic crosses the spine, and is never silent."""
    if port.off_rail_bytes_total:
        yield Check(
            f"rdma.off_rail {port.name}", "warn",
            f"{numbers.moved_bytes(port.off_rail_bytes_total)} off the rail", "0 B",
            "The peer has no port on this rail: give it one, or name rails alike in rdma.rails.",
        )  # fmt: skip
    for note in port.notes:
        way_out = "Nothing, if it is wanted so; else change what the text names."
        yield Check(f"rdma.note {port.name}", "warn", note, "nothing to say", way_out)


def _memory_nodes(facts: NodeFacts) -> Iterator[Check]:
    """Slots at another memory node than any port cross the link between sockets on their way."""
    slots = facts.slots_by_memory_node
    ports = {port.numa_node for port in facts.rdma_ports} - {-1}
    if not slots or not ports:
        return
    placed = {node: count for node, count in slots.items() if node >= 0}
    shown = ", ".join(f"{numbers.count(count)} at {node}" for node, count in sorted(placed.items()))
    spread = slots.get(-1, 0)
    value = f"slots: {shown or 'none placed'}" + (
        f", {numbers.count(spread)} spread or unknown" if spread else ""
    )
    wanted = f"at the ports' memory nodes ({', '.join(map(str, sorted(ports)))})"
    near = sum(count for node, count in placed.items() if node in ports)
    if 2 * near >= sum(slots.values()):
        yield Check("rdma.numa", "ok", value, wanted)
        return
    yield Check(
        "rdma.numa", "warn", value, wanted,
        "The kernel did not place the slab (mbind was refused, or those nodes are full): let the "
        "agent use them (cpuset), or take a smaller slab.",
    )  # fmt: skip


# --- pairs ----------------------------------------------------------------------------------


class _End(NamedTuple):
    """One port as its node sees it."""

    port: Port
    gid_type: GidType
    gid: str
    mtu: int


def pair_rdma_checks(
    found: TransportProbe, source: NodeFacts, destination: NodeFacts
) -> Iterator[Check]:
    """Both ends of each path compared (C05, R27), and each path that a probe used (C12)."""
    me, them = destination.node_id, source.node_id
    mine, theirs = _ends(destination), _ends(source)
    if mine and theirs:
        choice = choose_rails([end.port for end in mine], [end.port for end in theirs], them)
        for rail in choice.rails[:MAX_RAILS]:
            yield from _compared(mine[rail.mine], theirs[rail.theirs], me, them)
    for path in found.rails[:MAX_RAILS]:
        name = f"rdma.rail {path.port}>{path.peer_port}"
        if path.error:
            way_out = (
                "See whether a path leads from one port to the other (ibv_rc_pingpong between them, "
                "ip route, VLAN, subnet), or leave the device out of rdma.devices on both nodes."
            )
            yield Check(name, "fail", path.error, "a path", way_out)
        elif path.off_rail:
            way_out = "Give the peer a port on that rail, or name rails alike in rdma.rails."
            yield Check(name, "warn", "off the rail", "on one rail", way_out)
        else:
            value = f"MTU {path.mtu}, {numbers.moved_bytes(path.moved_bytes)}"
            yield Check(name, "ok", value, "a path")


def _compared(mine: _End, theirs: _End, me: str, them: str) -> Iterator[Check]:
    """What an agent refuses at the handshake, and what only makes it slower."""
    pair = f"{mine.port.name}>{theirs.port.name}"
    types = f"{mine.gid_type} at {me}, {theirs.gid_type} at {them}"
    if problem := check_types(mine.gid_type, theirs.gid_type, me, them):
        _, _, way_out = problem.partition(". ")
        yield Check(f"rdma.gid {pair}", "fail", types, "the same at both ends", way_out)
    else:
        yield Check(f"rdma.gid {pair}", "ok", types, "the same at both ends")
    value = f"{mine.mtu} at {me}, {theirs.mtu} at {them}"
    choice = choose_mtu(mine.mtu, theirs.mtu, me, them)
    if choice.statement:
        way_out = choice.statement.partition(". ")[2]
        yield Check(f"rdma.mtu {pair}", "warn", value, "the same at both ends", way_out)
    else:
        yield Check(f"rdma.mtu {pair}", "ok", value, "the same at both ends")


def _ends(facts: NodeFacts) -> list[_End]:
    """As the agent opened them; as the host shows them where it has not."""
    if facts.rdma_ports:
        return [_opened(port) for port in facts.rdma_ports if port.state == "ACTIVE"]
    shown = (_shown(port, facts.host) for port in facts.host.ports if port.state == "ACTIVE")
    return [end for end in shown if end is not None]


def _opened(port: RdmaPortStats) -> _End:
    device, _, number = port.name.rpartition("/")
    made = Port(device, int(number), numa_node=port.numa_node)
    return _End(made, GidType(port.gid_type), port.gid, port.active_mtu)


def _shown(port: RdmaPort, host: HostFacts) -> _End | None:
    local = [address for one in host.interfaces if one.up for address in one.addresses]
    try:
        choice = choose_gid(port.gids, local)
    except ConfigError:
        return None
    names = {entry.netdev for entry in port.gids if entry.netdev}
    mtus = [one.mtu for one in host.interfaces if one.name in names]
    if not mtus:
        return None
    made = Port(port.device, port.number, numa_node=port.numa_node, gbps=port.gbps)
    return _End(made, choice.type, choice.gid, roce_mtu(min(mtus)))


def roce_mtu(interface_mtu: int) -> int:
    """The path MTU that RoCE can have over an interface of that MTU."""
    fitting = [size for size in MTU_SIZES if size + ROCE_HEADERS <= interface_mtu]
    return fitting[-1] if fitting else MTU_SIZES[0]
