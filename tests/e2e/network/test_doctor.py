"""The doctor between hosts whose network is broken in one way at a time."""

from __future__ import annotations

import time

import pytest
from net_agents import Node

from workers.core.doctor_messages import GetProbe, Probe, ProbeReport
from workers.core.doctor_pairs import pair_checks
from workers.core.doctor_verdict import Check
from workers.core.transfer_messages import HolderRef

pytestmark = [
    pytest.mark.netns, pytest.mark.heavy, pytest.mark.xdist_group("netns"),
    pytest.mark.timeout(240),
]  # fmt: skip

PROBE_BOUND_SECONDS = 60.0


def examine(source: Node, destination: Node) -> dict[str, Check]:
    """Probe, and the checks by name."""
    facts = source.facts()
    holder = HolderRef(facts.node_id, facts.endpoint, facts.incarnation)
    report = destination.operator.call(Probe(holder), ProbeReport)
    deadline = time.monotonic() + PROBE_BOUND_SECONDS
    while report.state == "running":
        assert time.monotonic() < deadline, report
        time.sleep(0.1)
        report = destination.operator.call(GetProbe(report.probe_id), ProbeReport)
    return {check.name: check for check in pair_checks(report, facts, destination.facts())}


def until(source: Node, destination: Node, state: str) -> dict[str, Check]:
    """The breaker may be open for a while after a fault."""
    deadline = time.monotonic() + 60
    while True:
        checks = examine(source, destination)
        if checks["tcp.reach"].state == state:
            return checks
        assert time.monotonic() < deadline, checks
        time.sleep(0.5)


def test_hosts_that_reach_one_another(nodes: list[Node]) -> None:
    checks = until(nodes[0], nodes[1], "ok")
    assert checks["mtu"].state == "ok"
    assert checks["tcp.bandwidth"].state in ("ok", "warn")  # a busy machine is slow
    assert "1500 at n2" in checks["mtu"].value


def test_c12_an_isolated_host(nodes: list[Node]) -> None:
    one, two, *_ = nodes
    one.host.cut()
    try:
        checks = examine(one, two)
    finally:
        one.host.join()
    assert set(checks) == {"control"}
    assert checks["control"].state == "fail"
    assert checks["control"].value.startswith("n2 cannot reach n1 over tcp: ")
    assert checks["control"].what_to_do
    until(one, two, "ok")


def test_c12_a_firewall_before_the_transfers_alone(nodes: list[Node]) -> None:
    one, two, *_ = nodes
    one.host.wall(f"tcp dport {one.transfer_address[1]} drop")
    try:
        checks = until(one, two, "fail")
    finally:
        one.host.heal()
    assert checks["control"].state == "ok"
    assert checks["tcp.reach"].value.startswith("n2 cannot reach n1 over tcp: ")
    until(one, two, "ok")


def test_large_packets_that_vanish(nodes: list[Node]) -> None:
    """As where one end has jumbo frames and a switch has not."""
    one, two, *_ = nodes
    two.host.wall("meta length > 1400 drop")
    try:
        checks = examine(one, two)
    finally:
        two.host.heal()
    assert checks["control"].state == "ok"
    assert checks["tcp.large"].state == "fail", checks
    assert "MTU" in checks["tcp.large"].what_to_do
    until(one, two, "ok")
