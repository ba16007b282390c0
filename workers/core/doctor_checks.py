"""The doctor's checks of one node. Pure: facts in, verdicts out; each says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from workers.core import numbers
from workers.core.doctor_messages import HostFacts, NodeFacts, RdmaPort, Space
from workers.core.doctor_rdma import rdma_checks, roce_mtu, split_problem
from workers.core.doctor_verdict import Check, State
from workers.core.errors import ConfigError
from workers.core.rdma_choice import MTU_SIZES, check_locked_memory, choose_gid
from workers.core.transfer_types import SMALL_PIECE_BYTES

GIB: Final = 1 << 30
MIB: Final = 1 << 20
CLOCK_WARN_SECONDS: Final = 0.1
CLOCK_FAIL_SECONDS: Final = 5.0
LOGS_WARN_BYTES: Final = GIB
LOGS_FAIL_BYTES: Final = 64 * MIB
MIN_WINDOW_OPS: Final = 16
HUGE_SLAB_BYTES: Final = 16 * GIB
NOTHING: Final = ""


def unreachable(error: str) -> list[Check]:
    """All that can be said of a node whose agent does not answer."""
    way_out = (
        "See whether its agent runs (perilune status, perilune logs) and its endpoint is right."
    )
    return [Check("agent", "fail", error, "answers within 5 s", way_out)]


def node_checks(
    facts: NodeFacts, clock_offset: float | None = None, clock_error: float = 0.0
) -> list[Check]:
    """`clock_offset`: the node's clock less the asker's, seconds, give or take `clock_error`."""
    return [
        Check("agent", "ok", f"incarnation {facts.incarnation}", "answers within 5 s"),
        _ready(facts),
        *_transfers(facts),
        *rdma_checks(facts),
        *host_checks(facts.host, facts.slab_bytes, uses_rdma="rdma" in facts.transports),
        *_queue_depths(facts),
        clock("clock", clock_offset, clock_error),
        *_alignment(facts),
    ]


def host_checks(host: HostFacts, slab_bytes: int, *, uses_rdma: bool) -> list[Check]:
    """What can be checked without an agent."""
    return [
        *_devices(host, uses_rdma=uses_rdma),
        _memlock(host, slab_bytes, uses_rdma=uses_rdma),
        _huge_pages(host, slab_bytes),
        *map(_space, host.spaces),
    ]


def _ready(facts: NodeFacts) -> Check:
    """C06: a node that was told to use RDMA alone takes nothing else in its place."""
    if not facts.not_ready:
        return Check("ready", "ok", "yes", "yes")
    value, way_out = split_problem(facts.not_ready)
    more = "or add tcp to the agent's --transports."
    return Check("ready", "fail", f"not ready: {value}", "yes", f"{way_out} {more}".strip())


# --- RDMA -----------------------------------------------------------------------------------


def _devices(host: HostFacts, *, uses_rdma: bool) -> Iterator[Check]:
    if not host.ports:
        yield Check(
            "rdma.devices", "fail" if uses_rdma else "ok", "none",
            "a device" if uses_rdma else "none needed",
            "Load the device's driver, or leave rdma out of the transports."
            if uses_rdma
            else "Nothing: blocks move over TCP and shared memory.",
        )  # fmt: skip
        return
    active = [port for port in host.ports if port.state == "ACTIVE"]
    found = f"{len(host.ports)} ports, {len(active)} active"
    if not uses_rdma:
        yield Check(
            "rdma.devices", "warn", f"{found}, not used", "used where they are",
            "Add rdma to the agent's --transports to move blocks over them.",
        )  # fmt: skip
    else:
        yield Check("rdma.devices", "ok" if active else "fail", found, "an active port", NOTHING if active else "Set a port up: ip link set DEVICE up, then look at its cable and switch.")  # fmt: skip
    for port in host.ports:
        yield from _port(port, host, uses_rdma=uses_rdma)


def _port(port: RdmaPort, host: HostFacts, *, uses_rdma: bool) -> Iterator[Check]:
    bad: State = "fail" if uses_rdma else "warn"
    if port.state != "ACTIVE":
        yield Check(
            f"rdma.port {port.name}", bad, port.state or "unknown", "ACTIVE",
            "Set its interface up (ip link set ... up), then look at cable and switch port; "
            "or leave it out of rdma.devices.",
        )  # fmt: skip
        return
    yield Check(f"rdma.port {port.name}", "ok", f"ACTIVE, {port.link_layer}", "ACTIVE")
    yield _speed(port)
    yield _gid(port, host, bad)
    if port.link_layer != "InfiniBand":
        yield _port_mtu(port, host)


def _speed(port: RdmaPort) -> Check:
    name = f"rdma.speed {port.name}"
    if not port.gbps:
        return Check(name, "unknown", numbers.UNKNOWN, "a speed", "Ask the device: ibstat.")
    return Check(name, "ok", f"{port.gbps:g} Gbps")


def _gid(port: RdmaPort, host: HostFacts, bad: State) -> Check:
    name = f"rdma.gid {port.name}"
    local = [address for one in host.interfaces if one.up for address in one.addresses]
    try:
        choice = choose_gid(port.gids, local)
    except ConfigError as error:
        return Check(name, bad, "none", "RoCEv2, routable", error.way_out)
    if choice.warning:
        return Check(name, "warn", choice.reason, "RoCEv2, routable", f"{choice.warning}.")
    return Check(name, "ok", choice.reason, "RoCEv2, routable")


def _port_mtu(port: RdmaPort, host: HostFacts) -> Check:
    """Of the interface under a RoCE port: what it lets the port use."""
    name = f"rdma.mtu {port.name}"
    names = {entry.netdev for entry in port.gids if entry.netdev}
    mtus = [one.mtu for one in host.interfaces if one.name in names]
    if not mtus:
        return Check(name, "unknown", numbers.UNKNOWN, "4096", "Ask the device: ibv_devinfo.")
    path = roce_mtu(min(mtus))
    value = f"{path} (interface {min(mtus)})"
    if path < MTU_SIZES[-1]:
        way_out = "Raise it on both ends and on the switch: ip link set DEVICE mtu 9000."
        return Check(name, "warn", value, "4096 (interface 4200 or more)", way_out)
    return Check(name, "ok", value, "4096")


def _memlock(host: HostFacts, slab_bytes: int, *, uses_rdma: bool) -> Check:
    """C06: registering the slab pins it once for each device."""
    devices = {port.device for port in host.ports if port.state == "ACTIVE"}
    found = check_locked_memory(
        slab_bytes, len(devices), host.memlock_limit_bytes,
        privileged=host.memlock_privileged, locked=host.memlock_pinned_bytes,
    )  # fmt: skip
    value, _, way_out = found.statement.partition(". ")
    wanted = f"{numbers.stored_bytes(slab_bytes * max(1, len(devices)))} or unlimited"
    if found.ok:
        return Check("memlock", "ok", value, wanted)
    if not uses_rdma:
        return Check("memlock", "ok", f"{value}; no RDMA is used, so nothing is pinned", wanted)
    # what is registered by now is counted as pinned: the slab's own registration is no lack
    if host.memlock_pinned_bytes >= slab_bytes * max(1, len(devices)):
        return Check("memlock", "ok", "the slab is registered", wanted)
    return Check("memlock", "fail", value, wanted, way_out)


# --- memory and room ------------------------------------------------------------------------


def _huge_pages(host: HostFacts, slab_bytes: int) -> Check:
    pages = host.huge_pages
    reserved = f"{pages.total} reserved, {pages.free} free" if pages.total else "none reserved"
    value = f"{reserved}; shared memory: {pages.shmem or numbers.UNKNOWN}"
    helps = slab_bytes >= HUGE_SLAB_BYTES
    if not helps or pages.shmem in {"always", "within_size", "advise", "force"}:
        return Check("hugepages", "ok", value, "for slabs of 16 GiB or more")
    return Check(
        "hugepages", "warn", value, "shared memory: within_size",
        "A large slab costs fewer translations in huge pages: "
        "echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )  # fmt: skip


def _space(space: Space) -> Check:
    name = f"space.{space.name}"
    value = f"{numbers.stored_bytes(space.free_bytes)} free of {numbers.stored_bytes(space.total_bytes)} ({space.path})"
    if space.name == "logs":
        return _logs(name, value, space)
    reserve = min(GIB, space.total_bytes // 20) if space.name == "ssd" else 0
    need = space.needed_bytes + reserve
    wanted = f"{numbers.stored_bytes(need)} free"
    if space.free_bytes >= need:
        return Check(name, "ok", value, wanted)
    if space.name == "ssd":
        way_out = "Free some, or lower --ssd-gib: the tier stops to grow before the device is full."
        return Check(name, "warn", value, wanted, way_out)
    way_out = "Take a smaller --slab-gib, or enlarge it: mount -o remount,size=... /dev/shm."
    return Check(name, "fail", value, wanted, way_out)


def _logs(name: str, value: str, space: Space) -> Check:
    wanted = f"{numbers.stored_bytes(LOGS_WARN_BYTES)} free"
    if space.free_bytes >= LOGS_WARN_BYTES:
        return Check(name, "ok", value, wanted)
    state: State = "fail" if space.free_bytes < LOGS_FAIL_BYTES else "warn"
    return Check(
        name, state, value, wanted, f"Make room under {space.path}, or move the data folder."
    )


# --- transfers ------------------------------------------------------------------------------


def _transfers(facts: NodeFacts) -> Iterator[Check]:
    wanted = "reachable for other nodes"
    if not facts.transports or not facts.has_secret:
        lacks = "no cluster secret" if not facts.has_secret else "no transport"
        yield Check(
            "transfers", "warn", f"off: {lacks}", wanted,
            "Start the agent with --secret-folder (and --transports); one node alone needs none.",
        )  # fmt: skip
        return
    if facts.transfer_problem:
        yield Check(
            "transfers", "fail", facts.transfer_problem, wanted,
            "See which process has the address, or give the agent another --tcp host.",
        )  # fmt: skip
        return
    if facts.not_ready:
        return  # the check `ready` has it
    if not facts.block_bytes:
        yield Check(
            "transfers", "unknown", "no worker has joined yet", wanted,
            "Start a worker on this node: slots are cut by its first namespace.",
        )  # fmt: skip
        return
    if not facts.endpoint:
        yield Check(
            "transfers", "warn", "no TCP endpoint", wanted,
            "Give the agent --tcp HOST:PORT, so that other nodes reach it.",
        )  # fmt: skip
        return
    named = ", ".join(f"{name} {at}" for name, at in sorted(facts.addresses.items()))
    yield Check("transfers", "ok", named, wanted)
    for alarm in facts.alarms[:8]:
        way_out = "perilune doctor --pair A:B probes the pair; the breaker closes by itself."
        yield Check("transfers.alarm", "warn", alarm, "no breaker open", way_out)


def _queue_depths(facts: NodeFacts) -> Iterator[Check]:
    """C14: the depth that the device or peer really gives, for links in use."""
    for link in facts.links:
        if link.state != "up":
            continue
        name = f"queue_depth {link.peer} {link.transport}"
        if link.window_ops >= MIN_WINDOW_OPS:
            yield Check(name, "ok", f"{link.window_ops} ops", f"{MIN_WINDOW_OPS} or more")
        else:
            yield Check(
                name, "warn", f"{link.window_ops} ops", f"{MIN_WINDOW_OPS} or more",
                "The device gives no more: raise its max_qp_wr and max_cqe, or the peer's depth.",
            )  # fmt: skip


def clock(name: str, offset: float | None, error: float) -> Check:
    """An offset that the way there and back could explain is none."""
    wanted = f"within {numbers.duration(CLOCK_WARN_SECONDS)}"
    if offset is None:
        return Check(name, "unknown", numbers.UNKNOWN, wanted, "Ask again: perilune doctor.")
    value = f"{numbers.duration(offset)} +- {numbers.duration(error)}"
    least = max(0.0, abs(offset) - error)
    if least <= CLOCK_WARN_SECONDS:
        return Check(name, "ok", value, wanted)
    state: State = "fail" if least > CLOCK_FAIL_SECONDS else "warn"
    way_out = (
        "Run an NTP client (chrony, systemd-timesyncd): times of different nodes do not compare."
    )
    return Check(name, state, value, wanted, way_out)


# --- blocks ---------------------------------------------------------------------------------


def _alignment(facts: NodeFacts) -> Iterator[Check]:
    """Pool blocks against the engine's, of each namespace that workers have brought."""
    if not facts.namespaces:
        yield Check(
            "blocks", "unknown", "no worker has joined yet", "pool block = n x engine block",
            "Start a worker on this node.",
        )  # fmt: skip
    for info in facts.namespaces:
        spec = info.spec
        name = f"blocks {spec.model_id}"
        value = f"pool {spec.block_tokens}, engine {spec.engine_block_tokens}, agent {facts.block_tokens} tokens"
        wanted = "pool block = n x engine block = the agent's"
        aligned = spec.engine_block_tokens > 0 and not spec.block_tokens % spec.engine_block_tokens
        if not aligned or spec.block_tokens != facts.block_tokens:
            way_out = "Nothing would ever hit: give workers and agent the same --block-tokens."
            yield Check(name, "fail", value, wanted, way_out)
        elif spec.block_bytes < SMALL_PIECE_BYTES:
            yield Check(
                name, "warn", f"{value}; {numbers.stored_bytes(spec.block_bytes)} a block",
                f"{numbers.stored_bytes(SMALL_PIECE_BYTES)} a block or more",
                "Small pieces halve the throughput: raise --block-tokens.",
            )  # fmt: skip
        else:
            yield Check(name, "ok", value, wanted)
