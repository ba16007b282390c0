"""Three node agents on three hosts: blocks move over TCP, whatever the network does meanwhile.

Each test ends with the right bytes on the node that asked, without anything being restarted.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from network import Host, network

from workers.client import AgentClient, make_hello
from workers.core.errors import AgentUnavailableError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import LookupReply, StoredSlot
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import Fetch, HolderRef
from workers.pool.arena import Slab

pytestmark = [
    pytest.mark.netns, pytest.mark.heavy, pytest.mark.xdist_group("netns"),
    pytest.mark.timeout(240),
]  # fmt: skip

MIB = 1 << 20
NUM_BLOCKS = 24
SPEC = NamespaceSpec(
    "m", "1", "bf16", "LBHNC", "vec", (262_144, 262_144), 32, 64, 1, "tp1"
)  # 1 MiB a block
NAMESPACE = namespace_digest(SPEC)
SLAB_BYTES = 160 * MIB
FETCH_BOUND_SECONDS = 30.0
"""No fetch is under way for longer, whatever happens (10 s, and what promotions and stalls add)."""
_numbers = count(1)


@dataclass
class Node:
    """An agent in a host of its own, asked over its Unix socket."""

    host: Host
    process: subprocess.Popen[bytes]
    client: AgentClient
    endpoint: str

    @property
    def holder(self) -> HolderRef:
        welcome = self.client.welcome
        assert welcome is not None
        return HolderRef(welcome.node_id, self.endpoint, welcome.incarnation)

    def slab(self) -> Slab:
        welcome = self.client.welcome
        assert welcome is not None
        return Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    folder = tmp_path_factory.mktemp("net")
    with network(3) as hosts:
        made = [_start(host, index, folder) for index, host in enumerate(hosts, 1)]
        try:
            yield made
        finally:
            for node in made:
                node.client.close()
                node.process.terminate()
            for node in made:
                node.process.wait(20)


def _start(host: Host, index: int, folder: Path) -> Node:
    name = f"n{index}"
    socket = folder / f"{name}.sock"
    command = [
        sys.executable, "-m", "workers", "agent", "--node-id", name, "--socket", str(socket),
        "--tcp", f"{host.address}:7710", "--slab-name", f"perilune-{host.name}.slab",
        "--slab-bytes", str(SLAB_BYTES), "--block-tokens", "64",
        "--secret-folder", str(folder), "--transports", "tcp",
    ]  # fmt: skip
    with (folder / f"{name}.log").open("wb") as log:
        process = host.popen(command, stdout=log, stderr=log)
    client = AgentClient(f"unix:{socket}", make_hello("worker", f"w{index}", namespace=SPEC), 20.0)
    deadline = time.monotonic() + 60
    while True:
        try:
            client.connect()
        except AgentUnavailableError:
            assert time.monotonic() < deadline, (folder / f"{name}.log").read_text()
            time.sleep(0.1)
        else:
            return Node(host, process, client, f"tcp:{host.address}:7710")


def content(key: bytes) -> bytes:
    return (key * (SPEC.block_bytes // len(key) + 1))[: SPEC.block_bytes]


def new_chain(num_blocks: int = NUM_BLOCKS) -> list[bytes]:
    start = next(_numbers) * 100_000
    tokens = list(range(start, start + 64 * num_blocks))
    return [bytes(key) for key in block_hashes(root_hash(NAMESPACE, None, None), tokens, 64)]


def store(node: Node, keys: list[bytes]) -> None:
    slab = node.slab()
    prepared = node.client.prepare_store("transfer:seed", NAMESPACE, b"", keys)
    done = []
    for key, ref in zip(keys, prepared.slots, strict=True):
        assert ref is not None
        checksum = slab.write_block(ref.slot, ref.generation, key, content(key))
        done.append(StoredSlot(ref.slot, ref.generation, checksum))
    node.client.complete_store("transfer:seed", done)
    node.client.release("transfer:seed")
    slab.close()


def begin(node: Node, holder: HolderRef, keys: list[bytes]) -> None:
    node.client.call(Fetch("transfer:t", NAMESPACE, keys, holder), LookupReply)


def held_when_settled(node: Node, keys: list[bytes]) -> int:
    """How much is there once nothing is under way any more; that is bounded."""
    deadline = time.monotonic() + FETCH_BOUND_SECONDS
    while (found := node.client.lookup(NAMESPACE, keys)).num_pending:
        assert time.monotonic() < deadline, f"still under way: {found}"
        time.sleep(0.02)
    node.client.release("transfer:t")
    return found.num_held


def check_bytes(node: Node, keys: list[bytes]) -> None:
    slab = node.slab()
    refs = node.client.prepare_load("load:check", NAMESPACE, keys)
    assert len(refs) == len(keys)
    for key, ref in zip(keys, refs, strict=True):
        assert slab.read_block(ref.slot, ref.generation, key) == content(key)
    node.client.release("load:check")
    slab.close()


def fetch_until_there(node: Node, holder: HolderRef, keys: list[bytes]) -> None:
    """As workers do: another request asks again. A breaker may be open for a while."""
    deadline = time.monotonic() + 60
    while True:
        begin(node, holder, keys)
        if held_when_settled(node, keys) == len(keys):
            break
        assert time.monotonic() < deadline, "no recovery"
        time.sleep(0.5)
    check_bytes(node, keys)


def test_blocks_move_between_three_hosts(nodes: list[Node]) -> None:
    one, two, three = nodes
    keys = new_chain()
    store(one, keys)
    begin(two, one.holder, keys)
    begin(three, one.holder, keys)
    assert held_when_settled(two, keys) == len(keys)
    assert held_when_settled(three, keys) == len(keys)
    check_bytes(two, keys)
    check_bytes(three, keys)
    moved = two.client.stats().moved_bytes_total
    assert moved == len(keys) * SPEC.block_bytes


def test_one_percent_loss_is_no_storm(nodes: list[Node]) -> None:
    one, two, _ = nodes
    keys = new_chain()
    store(one, keys)
    two.host.lose(1)
    try:
        sent_before, resent_before = one.host.counters()[1], one.host.retransmitted_segments()
        fetch_until_there(two, one.holder, keys)
        sent = one.host.counters()[1] - sent_before
        resent = one.host.retransmitted_segments() - resent_before
    finally:
        two.host.heal()
    assert resent > 0
    assert sent < 1.25 * len(keys) * SPEC.block_bytes, f"{sent} bytes, {resent} segments again"


def test_a_rate_cap_slows_and_nothing_else(nodes: list[Node]) -> None:
    one, two, _ = nodes
    keys = new_chain(12)
    store(one, keys)
    one.host.cap(100)
    try:
        began = time.monotonic()
        fetch_until_there(two, one.holder, keys)
        took = time.monotonic() - began
    finally:
        one.host.cap(None)
    assert took > 0.8 * 12 * MIB * 8 / 100e6


def test_a_cut_of_ten_seconds_heals_without_a_restart(nodes: list[Node]) -> None:
    one, two, _ = nodes
    keys = new_chain()
    store(one, keys)
    one.host.cap(100)  # so that the cut meets it on its way
    begin(two, one.holder, keys)
    time.sleep(0.5)
    one.host.cut()
    cut_at = time.monotonic()
    held = held_when_settled(two, keys)
    assert held < len(keys)
    assert two.client.stats().pending_blocks == 0
    time.sleep(max(0.0, 10 - (time.monotonic() - cut_at)))
    one.host.join()
    one.host.cap(None)
    fetch_until_there(two, one.holder, keys)


def test_a_half_open_peer_is_given_up_and_found_again(nodes: list[Node]) -> None:
    one, two, three = nodes
    keys = new_chain()
    store(one, keys)
    one.host.cap(100)
    begin(two, one.holder, keys)
    time.sleep(0.5)
    two.host.drop_all()
    try:
        assert held_when_settled(two, keys) < len(keys)
        begin(three, one.holder, keys)  # others are served meanwhile
        one.host.cap(None)
        assert held_when_settled(three, keys) == len(keys)
    finally:
        two.host.heal()
        one.host.cap(None)
    fetch_until_there(two, one.holder, keys)


def test_the_books_are_balanced_at_the_end(nodes: list[Node]) -> None:
    for node in nodes:
        stats = node.client.stats()
        assert (stats.pinned_blocks, stats.pending_blocks) == (0, 0)
        assert all(pair.in_flight == 0 for pair in stats.transfers.pairs)
