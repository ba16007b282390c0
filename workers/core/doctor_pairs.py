"""The doctor's checks of one pair: blocks go from `source` to `destination`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from workers.core import numbers
from workers.core.disaggregation import Bound, gbps
from workers.core.doctor_checks import clock
from workers.core.doctor_messages import Interface, NodeFacts, ProbeReport, TransportProbe
from workers.core.doctor_rdma import pair_rdma_checks
from workers.core.doctor_verdict import Check, State

SLOW_SHARE: Final = 0.4
"""Of the link's speed: a probe that reaches less is worth a look."""
SLOW_SMALL_SECONDS: Final = 0.02


def pair_checks(
    report: ProbeReport,
    source: NodeFacts | None,
    destination: NodeFacts | None,
    bound: Bound | None = None,
) -> list[Check]:
    """Facts are None where a node did not answer. `bound`: what disaggregation needs here."""
    pair = f"{report.destination} cannot reach {report.source}"
    if report.error:
        return [
            Check(
                "control", "fail", f"{pair} over tcp: {report.error}", "an answer within 3 s",
                f"See whether the agent of {report.source} runs, then routes and firewalls between "
                "the two: its TCP endpoint must be open to every other node.",
            )
        ]  # fmt: skip
    checks = [_control(report), _clocks(report), *_mtu(report, source, destination)]
    for found in report.transports:
        checks += _transport(report, found, source, destination)
        if found.transport == "rdma" and found.offered and source and destination:
            checks += pair_rdma_checks(found, source, destination)
    return [*checks, _disaggregation(report, bound)]


def _control(report: ProbeReport) -> Check:
    return Check("control", "ok", f"answers in {numbers.duration(report.control_seconds)}")


def _clocks(report: ProbeReport) -> Check:
    return clock("clock", report.clock_offset_seconds, (report.control_seconds or 0.0) / 2)


# --- MTU and speed of the interfaces --------------------------------------------------------


def _mtu(
    report: ProbeReport, source: NodeFacts | None, destination: NodeFacts | None
) -> Iterator[Check]:
    mine = _interface(destination, report.local_address)
    theirs = _interface(source, _host_of(source))
    if mine is None or theirs is None:
        yield Check(
            "mtu", "unknown", numbers.UNKNOWN, "the same at both ends",
            "The agents' --tcp addresses belong to no interface that is seen: compare by hand.",
        )  # fmt: skip
        return
    value = f"{mine.name} {mine.mtu} at {report.destination}, {theirs.name} {theirs.mtu} at {report.source}"
    if mine.mtu == theirs.mtu:
        yield Check("mtu", "ok", value, "the same at both ends")
    else:
        way_out = f"Set both to {max(mine.mtu, theirs.mtu)} (ip link set DEVICE mtu ...), and what lies between."
        yield Check("mtu", "warn", value, "the same at both ends", way_out)
    speeds = [one.mbps for one in (mine, theirs) if one.mbps]
    if speeds and mine.name != "lo":
        yield Check("link_speed", "ok", gbps(min(speeds) * 1e6 / 8))


def _interface(facts: NodeFacts | None, address: str) -> Interface | None:
    if facts is None or not address:
        return None
    found = (one for one in facts.host.interfaces if address in one.addresses)
    return next(found, None)


def _host_of(facts: NodeFacts | None) -> str:
    """The address in tcp:HOST:PORT."""
    return (
        "" if facts is None else facts.endpoint.removeprefix("tcp:").rpartition(":")[0].strip("[]")
    )


# --- transports -----------------------------------------------------------------------------


def _transport(
    report: ProbeReport,
    found: TransportProbe,
    source: NodeFacts | None,
    destination: NodeFacts | None,
) -> Iterator[Check]:
    name, other = found.transport, f"{report.destination} cannot reach {report.source}"
    if not found.offered:
        yield Check(
            f"{name}.reach", "warn", f"{report.source} does not offer it", "offered by both",
            f"Add {name} to its --transports, or leave it out on both nodes.",
        )  # fmt: skip
        return
    if name == "shm" and not _same_machine(source, destination):
        yield Check(f"{name}.reach", "ok", "another machine", "one machine")
        return
    error = found.small_error or found.large_error
    if error and not found.small_error and found.small_seconds is not None:
        yield Check(
            f"{name}.large", "fail",
            f"{other} over {name} with {numbers.moved_bytes(found.large_bytes)}, though "
            f"{numbers.moved_bytes(found.small_bytes)} pass: {error}",
            "small and large transfers pass",
            "Most often an MTU differs on the way (jumbo frames at one end only) or drops under "
            "load: compare `ip link` at both ends and the switch, ping -M do -s 8972 PEER.",
        )  # fmt: skip
        return
    if error:
        yield Check(
            f"{name}.reach", "fail", f"{other} over {name}: {error}", "a transfer", _way_out(name)
        )
        return
    yield Check(f"{name}.reach", "ok", f"{report.source} answers over {name}", "a transfer")
    yield from _measured(report, found, source, destination)


def _same_machine(source: NodeFacts | None, destination: NodeFacts | None) -> bool:
    """Unknown counts as yes: then the probe's own word holds."""
    if source is None or destination is None:
        return True
    return source.host.host_id == destination.host.host_id


def _way_out(transport: str) -> str:
    match transport:
        case "shm":
            return "Both agents must see one /dev/shm: share the host's IPC namespace, or leave shm out."
        case "rdma":
            return (
                "See that both ports are ACTIVE, on one rail and subnet, with GIDs of one type "
                "(ibv_rc_pingpong between them), or leave the device out of rdma.devices."
            )
        case _:
            return (
                "See routes and firewalls between the two: the port is in the node's check "
                "`transfers`, and is another than its agent's endpoint."
            )


def _measured(
    report: ProbeReport,
    found: TransportProbe,
    source: NodeFacts | None,
    destination: NodeFacts | None,
) -> Iterator[Check]:
    name = found.transport
    if found.small_seconds is not None:
        slow = found.small_seconds > SLOW_SMALL_SECONDS
        yield Check(
            f"{name}.latency", "warn" if slow else "ok",
            f"{numbers.duration(found.small_seconds)} for {numbers.stored_bytes(found.small_bytes)}",
            f"under {numbers.duration(SLOW_SMALL_SECONDS)}",
            "Look for load on both hosts and for loss on the way (ss -ti, ethtool -S)." if slow else "",
        )  # fmt: skip
    rate = found.bytes_per_second
    if rate is None:
        return
    speed = _speed(name, report, source, destination)
    value = f"{numbers.moved_rate(rate)} with {numbers.stored_bytes(found.large_bytes)}"
    cap = found.cap_bytes_per_second
    if cap:
        value += f", capped at {numbers.moved_rate(cap)} by the policy `transfer`"
        speed = min(speed or cap, cap)
    if speed is None or rate >= SLOW_SHARE * speed:
        wanted = "" if speed is None else f"{numbers.moved_rate(SLOW_SHARE * speed)} or more"
        yield Check(f"{name}.bandwidth", "ok", value, wanted)
    else:
        yield Check(
            f"{name}.bandwidth", "warn", value,
            f"{numbers.moved_rate(SLOW_SHARE * speed)} or more (the link has {gbps(speed)})",
            "Probe again while it is quiet; then look at cable, port counters, a cap on the link, "
            "and CPU on both hosts.",
        )  # fmt: skip
    if found.window_ops:
        yield Check(f"{name}.queue_depth", "ok", f"{found.window_ops} ops")


def _speed(
    transport: str, report: ProbeReport, source: NodeFacts | None, destination: NodeFacts | None
) -> float | None:
    """Bytes a second of the slower end, where both are known."""
    if source is None or destination is None or transport == "shm":
        return None
    if transport == "rdma":
        sides = [_rdma_gbps(source), _rdma_gbps(destination)]
        return min(sides) * 1e9 / 8 if all(sides) else None
    mine = _interface(destination, report.local_address)
    theirs = _interface(source, _host_of(source))
    if mine is None or theirs is None or not (mine.mbps and theirs.mbps):
        return None
    return min(mine.mbps, theirs.mbps) * 1e6 / 8


def _rdma_gbps(facts: NodeFacts) -> float:
    return sum(port.gbps for port in facts.host.ports if port.state == "ACTIVE")


# --- R34 ------------------------------------------------------------------------------------


def _disaggregation(report: ProbeReport, bound: Bound | None) -> Check:
    """Against `workers.core.disaggregation`: its docstring has the formula and its source."""
    name, rates = "disaggregation", [found.bytes_per_second for found in report.transports]
    best = max((rate for rate in rates if rate), default=None)
    if bound is None:
        return Check(
            name, "unknown", numbers.UNKNOWN, "bandwidth >= KV bytes a token x prefill tokens a second",
            "Serve some prompts of 256 tokens or more, or give --prefill-rate or --flops.",
        )  # fmt: skip
    how = {"measured": "measured", "given": "given", "geometry": "from the model's geometry"}[
        bound.source
    ]
    wanted = (
        f"{gbps(bound.bytes_per_second)}: {numbers.count(bound.kv_bytes_per_token)} bytes a token x "
        f"{numbers.count(bound.tokens_per_second)} tokens/s ({how})"
    )
    if best is None:
        return Check(
            name, "unknown", f"needs {gbps(bound.bytes_per_second)}, has no measured bandwidth", wanted,
            "Mend what failed above, then run it again.",
        )  # fmt: skip
    value = f"needs {gbps(bound.bytes_per_second)}, has {gbps(best)}"
    state: State = "ok" if best >= bound.bytes_per_second else "warn"
    way_out = (
        "Across this pair it is quicker to compute than to move: keep prefill and decode on one "
        "host, or give the pair a faster link (RDMA)."
    )
    return Check(name, state, value, wanted, way_out if state == "warn" else "")
