"""Node agents, each a process of its own, that move blocks over RDMA."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fetching import WAIT_SECONDS, Node, check_bytes, fetch, settled, store

from workers.core.doctor_checks import node_checks
from workers.core.doctor_messages import GetNodeFacts, GetProbe, NodeFacts, Probe, ProbeReport
from workers.core.doctor_pairs import pair_checks
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_stats import PairStats

SLAB = 16 << 20
LINK = os.environ.get("RDMA_VM_LINK", "dummy0")
MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(
    make_agent: Callable[..., Any],
    free_port: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> MakeNode:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))

    def make(name: str, transports: str, *, prefix: tuple[str, ...] = ()) -> Node:
        port = free_port()
        agent = make_agent(
            "--node-id", name, "--tcp", f"127.0.0.1:{port}", "--secret-folder", str(tmp_path),
            "--transports", transports, slab_bytes=SLAB,
        )  # fmt: skip
        plain = agent.command()
        agent.command = lambda: [*prefix, *plain]
        agent.start()
        return Node(agent, agent.worker(f"w-{name}"), port)

    return make


@pytest.fixture
def chain(spec: NamespaceSpec) -> tuple[bytes, list[bytes]]:
    namespace = namespace_digest(spec)
    keys = block_hashes(root_hash(namespace, None, None), list(range(64 * 96)), 64)
    return namespace, [bytes(key) for key in keys]


@pytest.fixture
def link() -> Iterator[Callable[[str], None]]:
    """Sets the interface under the device up or down."""

    def put(state: str) -> None:
        subprocess.run(["ip", "link", "set", LINK, state], check=True)

    yield put
    put("up")


def moved(node: Node) -> dict[str, PairStats]:
    return {pair.transport: pair for pair in node.client.stats().transfers.pairs}


def test_blocks_move_over_rdma_and_over_tcp_when_the_device_is_gone(
    make_node: MakeNode,
    chain: tuple[bytes, list[bytes]],
    spec: NamespaceSpec,
    link: Callable[[str], None],
) -> None:
    one, two = make_node("n1", "tcp,rdma"), make_node("n2", "auto")
    namespace, keys = chain
    store(one, namespace, keys, spec.block_bytes)
    fetch(two, one.holder, namespace, keys[:64])
    assert settled(two, namespace, keys[:64]).num_held == 64
    check_bytes(two, namespace, keys[:64])
    pair = moved(two)["rdma"]
    assert (pair.source, pair.destination) == ("n1", "n2")
    assert pair.bytes_total == 64 * spec.block_bytes
    stats = two.client.stats().transfers
    (port,), (rail,) = stats.ports, stats.rails
    assert (port.name, port.state, port.gid_type) == ("rxe0/1", "ACTIVE", "roce_v2")
    assert port.read_bytes_total == rail.moved_bytes == 64 * spec.block_bytes
    assert (rail.peer, rail.peer_port, rail.mtu) == ("n1", "rxe0/1", 4096)

    link("down")
    fetch(two, one.holder, namespace, keys)
    assert settled(two, namespace, keys).num_held == len(keys)
    check_bytes(two, namespace, keys)
    assert moved(two)["tcp"].bytes_total == 32 * spec.block_bytes
    after = two.client.stats().transfers
    assert after.ports[0].state == "DOWN"
    assert "n2 cannot reach n1 over rxe0/1 (to rxe0/1)" in after.rails[-1].error
    assert after.not_ready == "", "there is tcp"
    link("up")
    doctor_is_content(one, two)


def doctor_is_content(one: Node, two: Node) -> None:
    operator = two.agent.client("cli", "doctor")
    report = operator.call(Probe(one.holder, ["rdma"], 1 << 20), ProbeReport)
    deadline = time.monotonic() + WAIT_SECONDS
    while report.state != "done":
        assert time.monotonic() < deadline
        time.sleep(0.05)
        report = operator.call(GetProbe(report.probe_id), ProbeReport)
    source, destination = (
        node.agent.client("cli", "doctor").call(GetNodeFacts(), NodeFacts) for node in (one, two)
    )
    checks = {check.name: check for check in pair_checks(report, source, destination)}
    shown = {name: checks[name].state for name in checks if name.startswith("rdma")}
    assert shown["rdma.reach"] == "ok", checks
    assert shown["rdma.rail rxe0/1>rxe0/1"] == "ok", checks
    assert shown["rdma.gid rxe0/1>rxe0/1"] == "ok", checks
    assert shown["rdma.mtu rxe0/1>rxe0/1"] == "ok", checks
    own = {check.name: check for check in node_checks(destination)}
    assert own["ready"].state == "ok"
    assert own["rdma.retries rxe0/1"].state == "ok", own["rdma.retries rxe0/1"]


class TestC06:
    """An agent that may lock 8 MiB and has a slab of 16."""

    LIMITED = (
        "setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock",
        "bash", "-c", 'ulimit -l 8192; exec "$@"', "bash",
    )  # fmt: skip

    def test_c06_a_node_that_must_have_rdma_is_not_ready_and_says_why(
        self, make_node: MakeNode
    ) -> None:
        node = make_node("n1", "rdma", prefix=self.LIMITED)
        stats = node.client.stats().transfers
        assert "registering the slab pins 16 MiB" in stats.not_ready
        assert "the locked-memory limit is 8 MiB" in stats.not_ready
        assert "ulimit -l unlimited" in stats.not_ready
        welcome = node.client.welcome
        assert welcome is not None
        assert welcome.transfers == {}, "nothing took its place"
        facts = node.agent.client("cli", "doctor").call(GetNodeFacts(), NodeFacts)
        checks = {check.name: check for check in node_checks(facts)}
        assert checks["ready"].state == "fail"
        assert "8 MiB" in checks["ready"].value
        assert "LimitMEMLOCK=infinity" in checks["ready"].what_to_do

    def test_c06_where_tcp_will_do_it_does_and_the_reason_is_shown(
        self, make_node: MakeNode
    ) -> None:
        node = make_node("n1", "auto", prefix=self.LIMITED)
        stats = node.client.stats().transfers
        assert stats.not_ready == ""
        assert "the locked-memory limit is 8 MiB" in stats.problem
        welcome = node.client.welcome
        assert welcome is not None
        assert set(welcome.transfers) == {"shm", "tcp"}
        facts = node.agent.client("cli", "doctor").call(GetNodeFacts(), NodeFacts)
        checks = {check.name: check for check in node_checks(facts)}
        assert checks["rdma"].state == "warn"
        assert "8 MiB" in checks["rdma"].value
