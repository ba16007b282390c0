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
from workers.core.doctor_verdict import Check
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import Done
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import Push
from workers.core.transfer_stats import PairStats

SLAB = 16 << 20
LINK = os.environ.get("RDMA_VM_LINK", "dummy0")
MakeNodes = Callable[..., list[Node]]


@pytest.fixture
def make_nodes(
    make_agent: Callable[..., Any],
    free_port: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> MakeNodes:
    """`make_nodes(n1="tcp,rdma", n2="auto")`: by name, with these transports. They start together."""
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))

    def make(*, prefix: tuple[str, ...] = (), **transports: str) -> list[Node]:
        started = []
        for name, which in transports.items():
            port = free_port()
            agent = make_agent(
                "--node-id", name, "--tcp", f"127.0.0.1:{port}", "--secret-folder", str(tmp_path),
                "--transports", which, slab_bytes=SLAB,
            )  # fmt: skip
            agent.start_seconds = 120.0  # an emulated CPU, which others may be busy on
            plain = agent.command()
            agent.command = lambda plain=plain: [*prefix, *plain]
            agent.spawn()
            started.append((name, agent, port))
        return [Node(agent, agent.worker(f"w-{name}"), port) for name, agent, port in started]

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


def moved(node: Node) -> dict[tuple[str, str, str], PairStats]:
    pairs = node.client.stats().transfers.pairs
    return {(pair.source, pair.destination, pair.transport): pair for pair in pairs}


def test_blocks_move_over_rdma_and_over_tcp_when_the_device_is_gone(
    make_nodes: MakeNodes,
    chain: tuple[bytes, list[bytes]],
    spec: NamespaceSpec,
    link: Callable[[str], None],
) -> None:
    one, two = make_nodes(n1="tcp,rdma", n2="auto")
    namespace, keys = chain
    store(one, namespace, keys, spec.block_bytes)
    fetch(two, one.holder, namespace, keys[:64])
    assert settled(two, namespace, keys[:64]).num_held == 64
    check_bytes(two, namespace, keys[:64])
    assert moved(two)["n1", "n2", "rdma"].bytes_total == 64 * spec.block_bytes
    stats = two.client.stats().transfers
    (port,), (rail,) = stats.ports, stats.rails
    assert (port.name, port.state, port.gid_type) == ("rxe0/1", "ACTIVE", "roce_v2")
    assert port.read_bytes_total == rail.moved_bytes == 64 * spec.block_bytes
    assert (rail.peer, rail.peer_port, rail.mtu) == ("n1", "rxe0/1", 4096)

    blocks_are_pushed(two, one, namespace, spec.block_bytes)
    link("down")
    fetch(two, one.holder, namespace, keys)
    assert settled(two, namespace, keys).num_held == len(keys)
    check_bytes(two, namespace, keys)
    assert moved(two)["n1", "n2", "tcp"].bytes_total == 32 * spec.block_bytes
    after = two.client.stats().transfers
    assert after.ports[0].state == "DOWN"
    assert "n2 cannot reach n1 over rxe0/1 (to rxe0/1)" in after.rails[-1].error
    assert after.not_ready == "", "there is tcp"
    link("up")
    doctor_is_content(one, two)


def blocks_are_pushed(source: Node, target: Node, namespace: bytes, block_bytes: int) -> None:
    root = root_hash(namespace, "salt", None)
    keys = [bytes(key) for key in block_hashes(root, list(range(64 * 32)), 64)]
    store(source, namespace, keys, block_bytes)
    source.client.call(Push("transfer:p", namespace, keys, target.holder), Done)
    deadline = time.monotonic() + WAIT_SECONDS
    while target.client.lookup(namespace, keys).num_held < len(keys):
        assert time.monotonic() < deadline, source.agent.log
        time.sleep(0.05)
    check_bytes(target, namespace, keys)
    (port,) = source.client.stats().transfers.ports
    assert port.written_bytes_total == 32 * block_bytes, moved(source)


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


LIMITED = (
    "setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock",
    "bash", "-c", 'ulimit -l 8192; exec "$@"', "bash",
)  # fmt: skip


def checks_of(node: Node) -> dict[str, Check]:
    facts = node.agent.client("cli", "doctor").call(GetNodeFacts(), NodeFacts)
    return {check.name: check for check in node_checks(facts)}


def test_c06_an_agent_that_may_lock_less_than_its_slab(make_nodes: MakeNodes) -> None:
    """8 MiB, and a slab of 16: the one that must have RDMA is not ready, the other takes TCP; both
    say the limit, the need and the way out."""
    demands, takes_any = make_nodes(prefix=LIMITED, n1="rdma", n2="auto")
    stats = demands.client.stats().transfers
    assert "registering the slab pins 16 MiB" in stats.not_ready
    assert "the locked-memory limit is 8 MiB" in stats.not_ready
    assert "ulimit -l unlimited" in stats.not_ready
    assert offered(demands) == set(), "nothing took its place"
    ready = checks_of(demands)["ready"]
    assert ready.state == "fail"
    assert "8 MiB" in ready.value
    assert "LimitMEMLOCK=infinity" in ready.what_to_do

    stats = takes_any.client.stats().transfers
    assert stats.not_ready == ""
    assert "the locked-memory limit is 8 MiB" in stats.problem
    assert offered(takes_any) == {"shm", "tcp"}
    rdma = checks_of(takes_any)["rdma"]
    assert rdma.state == "warn"
    assert "8 MiB" in rdma.value


def offered(node: Node) -> set[str]:
    welcome = node.client.welcome
    assert welcome is not None
    return set(welcome.transfers)
