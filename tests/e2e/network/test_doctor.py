"""The doctor between hosts whose network is broken in one way at a time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from network import Host, network

from workers.client import AgentClient, make_hello
from workers.core.doctor_checks import Check
from workers.core.doctor_messages import GetNodeFacts, GetProbe, NodeFacts, Probe, ProbeReport
from workers.core.doctor_pairs import pair_checks
from workers.core.errors import AgentUnavailableError
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import HolderRef

pytestmark = [
    pytest.mark.netns, pytest.mark.heavy, pytest.mark.xdist_group("netns"),
    pytest.mark.timeout(240),
]  # fmt: skip

MIB = 1 << 20
SPEC = NamespaceSpec(
    "m", "1", "bf16", "LBHNC", "vec", (262_144, 262_144), 32, 64, 1, "tp1"
)  # 1 MiB a block
PROBE_BOUND_SECONDS = 60.0


@dataclass
class Node:
    """An agent in a host of its own, asked over its Unix socket."""

    host: Host
    process: subprocess.Popen[bytes]
    worker: AgentClient
    operator: AgentClient

    def facts(self) -> NodeFacts:
        return self.operator.call(GetNodeFacts(), NodeFacts)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    folder = tmp_path_factory.mktemp("net")
    with network(2) as hosts:
        made: list[Node] = []
        try:
            made += [_start(host, index, folder) for index, host in enumerate(hosts, 1)]
            yield made[0], made[1]
        finally:
            for node in made:
                node.worker.close()
                node.operator.close()
                node.process.terminate()
            for node in made:
                node.process.wait(20)


def _start(host: Host, index: int, folder: Path) -> Node:
    name = f"n{index}"
    socket = folder / f"{name}.sock"
    command = [
        sys.executable, "-m", "workers", "agent", "--node-id", name, "--socket", str(socket),
        "--tcp", f"{host.address}:7710", "--slab-name", f"perilune-{host.name}.slab",
        "--slab-bytes", str(160 * MIB), "--block-tokens", "64",
        "--secret-folder", str(folder), "--transports", "tcp",
    ]  # fmt: skip
    with (folder / f"{name}.log").open("wb") as log:
        process = host.popen(command, stdout=log, stderr=log)
    address = f"unix:{socket}"
    worker = AgentClient(address, make_hello("worker", f"w{index}", namespace=SPEC), 20.0)
    operator = AgentClient(address, make_hello("cli", "operator"), 20.0)
    deadline = time.monotonic() + 60
    while True:
        try:
            worker.connect()
        except AgentUnavailableError:
            assert time.monotonic() < deadline, (folder / f"{name}.log").read_text()
            time.sleep(0.1)
        else:
            return Node(host, process, worker, operator)


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


def test_hosts_that_reach_one_another(nodes: tuple[Node, Node]) -> None:
    checks = until(*nodes, "ok")
    assert checks["mtu"].state == "ok"
    assert checks["tcp.bandwidth"].state == "ok"
    assert "1500 at n2" in checks["mtu"].value


def test_c12_an_isolated_host(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
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


def test_c12_a_firewall_before_the_transfers_alone(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    port = one.facts().addresses["tcp"].rpartition(":")[2]
    one.host.run("nft", "add", "table", "inet", "wall")
    chain = "{ type filter hook input priority 0 ; }"
    one.host.run("nft", "add", "chain", "inet", "wall", "input", chain)
    rule = f"tcp dport {port} drop"
    one.host.run("nft", "add", "rule", "inet", "wall", "input", *rule.split())
    try:
        checks = until(one, two, "fail")
    finally:
        one.host.run("nft", "delete", "table", "inet", "wall")
    assert checks["control"].state == "ok"
    assert checks["tcp.reach"].value.startswith("n2 cannot reach n1 over tcp: ")
    until(one, two, "ok")


def test_large_packets_that_vanish(nodes: tuple[Node, Node]) -> None:
    """As where one end has jumbo frames and a switch has not."""
    one, two = nodes
    two.host.run("nft", "add", "table", "inet", "wall")
    chain = "{ type filter hook input priority 0 ; }"
    two.host.run("nft", "add", "chain", "inet", "wall", "input", chain)
    two.host.run(
        "nft", "add", "rule", "inet", "wall", "input", *["meta", "length", ">", "1400", "drop"]
    )
    try:
        checks = examine(one, two)
    finally:
        two.host.run("nft", "delete", "table", "inet", "wall")
    assert checks["control"].state == "ok"
    assert checks["tcp.large"].state == "fail", checks
    assert "MTU" in checks["tcp.large"].what_to_do
    until(one, two, "ok")
