"""The doctor's messages, against two real agents on loopback."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from workers.agent.doctor import under_cap
from workers.client import AgentClient
from workers.clock import SystemClock
from workers.core.doctor_messages import (
    EndProbe,
    GetNodeFacts,
    GetProbe,
    NodeFacts,
    PrepareProbe,
    Probe,
    ProbeReport,
    ScratchSlots,
)
from workers.core.errors import RefusedError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import Done, StoredSlot
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import HolderRef
from workers.core.transfer_types import Piece
from workers.pool.arena import Slab

WAIT_SECONDS = 60.0


@dataclass
class Node:
    """An agent, a worker of it, and an operator."""

    agent: Any
    worker: AgentClient
    operator: AgentClient
    holder: HolderRef


@pytest.fixture
def nodes(
    make_agent: Callable[..., Any],
    free_port: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[Node]]:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))
    made = []
    for name in ("n1", "n2"):
        port = free_port()
        agent = make_agent(
            "--node-id", name, "--tcp", f"127.0.0.1:{port}", "--secret-folder", str(tmp_path)
        )
        agent.start()
        worker = agent.worker(f"w-{name}")
        operator = AgentClient(worker.address, agent.hello("cli", "operator"), 20.0)
        holder = HolderRef(name, f"tcp:127.0.0.1:{port}", worker.connect().incarnation)
        made.append(Node(agent, worker, operator, holder))
    yield made
    for node in made:
        node.operator.close()


def probe(node: Node, holder: HolderRef, **options: Any) -> ProbeReport:
    report = node.operator.call(Probe(holder, **options), ProbeReport)
    deadline = time.monotonic() + WAIT_SECONDS
    while report.state == "running":
        assert time.monotonic() < deadline, report
        time.sleep(0.05)
        report = node.operator.call(GetProbe(report.probe_id), ProbeReport)
    return report


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_facts_of_a_node(nodes: list[Node], tmp_path: Path) -> None:
    facts = nodes[0].operator.call(GetNodeFacts(str(tmp_path)), NodeFacts)
    assert facts.node_id == "n1"
    assert any("127.0.0.1" in interface.addresses for interface in facts.host.interfaces)
    assert {space.name for space in facts.host.spaces} == {"slab", "logs"}
    assert set(facts.addresses) == {"shm", "tcp"}
    assert facts.has_secret
    assert facts.block_bytes == facts.namespaces[0].spec.block_bytes
    assert abs(facts.host.wall_seconds - SystemClock().wall()) < 60


def test_a_probe_measures_each_transport_and_leaves_nothing(nodes: list[Node]) -> None:
    one, two = nodes
    report = probe(two, one.holder)
    assert (report.source, report.destination, report.error) == ("n1", "n2", "")
    assert report.control_seconds is not None
    assert report.local_address == "127.0.0.1"
    assert [found.transport for found in report.transports] == ["shm", "tcp"]
    for found in report.transports:
        assert (found.small_error, found.large_error) == ("", ""), found
        assert found.small_seconds is not None
        assert found.bytes_per_second is not None
        assert found.window_ops > 0
    # scratch blocks were in no index, and their slots are free again
    for node in nodes:
        eventually(lambda node=node: node.worker.stats().used_blocks == 0)  # type: ignore[misc]
        assert node.worker.stats().stored_blocks_total == 0
        assert node.worker.stats().store_failed_total == 0
    pairs = two.worker.stats().transfers.pairs
    assert {(pair.transport, pair.priority) for pair in pairs} == {
        ("shm", "batch"),
        ("tcp", "batch"),
    }


def test_a_probe_of_a_full_pool_takes_few_blocks(nodes: list[Node], spec: NamespaceSpec) -> None:
    one, two = nodes
    capacity = one.worker.stats().capacity_blocks
    namespace = namespace_digest(spec)
    tokens = list(range(spec.block_tokens * capacity))
    keys = [bytes(key) for key in block_hashes(root_hash(namespace, None, None), tokens, 64)]
    welcome = one.worker.connect()
    slab = Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)
    prepared = one.worker.prepare_store("transfer:full", namespace, b"", keys)
    stored = [
        StoredSlot(
            ref.slot, ref.generation,
            slab.write_block(ref.slot, ref.generation, key, bytes(spec.block_bytes)),
        )
        for ref, key in zip(prepared.slots, keys, strict=True)
        if ref is not None
    ]  # fmt: skip
    one.worker.complete_store("transfer:full", stored)
    one.worker.release("transfer:full")
    slab.close()
    assert one.worker.stats().used_blocks == capacity
    assert probe(two, one.holder, transports=["tcp"]).transports[0].large_error == ""
    assert one.worker.lookup(namespace, keys).num_held >= capacity - max(1, capacity // 64)


def test_a_stopped_peer_is_not_reached_in_bounded_time(nodes: list[Node]) -> None:
    one, two = nodes
    os.kill(one.agent.pid, signal.SIGSTOP)
    try:
        report = probe(two, one.holder)
    finally:
        os.kill(one.agent.pid, signal.SIGCONT)
    assert report.error
    assert report.transports == []


def test_a_transport_that_the_peer_has_not(nodes: list[Node]) -> None:
    one, two = nodes
    (found,) = probe(two, one.holder, transports=["rdma"]).transports
    assert not found.offered


def test_a_probe_stays_under_a_cap() -> None:
    block = 1 << 20
    pieces = [Piece(i, 1, i, 1, b"k" * 16, block) for i in range(8)]
    assert under_cap(pieces, 0.0) == pieces
    assert under_cap(pieces, 3.5 * block) == pieces[:3]
    [part] = under_cap(pieces, 12_500.0)
    assert part.num_bytes == 12_500, "larger than a packet, and here in a second"


def test_who_may_ask(nodes: list[Node]) -> None:
    one, two = nodes
    with pytest.raises(RefusedError, match="only agents"):
        one.operator.call(PrepareProbe(1 << 20), ScratchSlots)
    with pytest.raises(RefusedError, match="only operators"):
        one.worker.call(Probe(two.holder), ProbeReport)
    with pytest.raises(RefusedError, match="no such probe"):
        one.operator.call(GetProbe("probe:none"), ProbeReport)
    assert one.operator.call(EndProbe(), Done) == Done(0)
