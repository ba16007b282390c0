"""Node agents on hosts of a network, each asked over its Unix socket, which no fault of the network
touches."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from network import Host, network

from workers.client import AgentClient, make_hello
from workers.core.doctor_messages import GetNodeFacts, NodeFacts
from workers.core.errors import AgentUnavailableError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import LookupReply, StoredSlot
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_messages import Fetch, HolderRef
from workers.core.transfer_stats import LinkStats
from workers.pool.arena import Slab

MIB = 1 << 20
SPEC = NamespaceSpec(
    "m", "1", "bf16", "LBHNC", "vec", (262_144, 262_144), 32, 64, 1, "tp1"
)  # 1 MiB a block
NAMESPACE = namespace_digest(SPEC)
SLAB_BYTES = 160 * MIB
FETCH_BOUND_SECONDS = 30.0
"""No fetch is under way for longer, whatever happens (10 s, and what promotions and stalls add)."""
RECOVERY_SECONDS = 60.0
_numbers = count(1)


@dataclass
class Node:
    """An agent in a host of its own. `worker` brought the namespace."""

    host: Host
    process: subprocess.Popen[bytes]
    worker: AgentClient
    operator: AgentClient

    @property
    def holder(self) -> HolderRef:
        welcome = self.worker.welcome
        assert welcome is not None
        endpoint = f"tcp:{self.host.address}:7710"
        return HolderRef(welcome.node_id, endpoint, welcome.incarnation)

    def facts(self) -> NodeFacts:
        return self.operator.call(GetNodeFacts(), NodeFacts)

    @property
    def transfer_address(self) -> tuple[str, int]:
        host, _, port = self.facts().addresses["tcp"].rpartition(":")
        return host, int(port)

    def link_to(self, other: Node) -> LinkStats:
        peer = other.holder.node_id
        links = self.worker.stats().transfers.links
        return next(link for link in links if (link.peer, link.transport) == (peer, "tcp"))

    def slab(self) -> Slab:
        welcome = self.worker.welcome
        assert welcome is not None
        return Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)

    # --- blocks -----------------------------------------------------------------------------

    def store(self, keys: list[bytes]) -> None:
        """Put blocks with these keys into the node's pool, each with the content of its key."""
        slab = self.slab()
        prepared = self.worker.prepare_store("transfer:seed", NAMESPACE, b"", keys)
        done = []
        for key, ref in zip(keys, prepared.slots, strict=True):
            assert ref is not None
            checksum = slab.write_block(ref.slot, ref.generation, key, content(key))
            done.append(StoredSlot(ref.slot, ref.generation, checksum))
        self.worker.complete_store("transfer:seed", done)
        self.worker.release("transfer:seed")
        slab.close()

    def begin(self, holder: HolderRef, keys: list[bytes]) -> None:
        self.worker.call(Fetch("transfer:t", NAMESPACE, keys, holder), LookupReply)

    def settled(self, keys: list[bytes]) -> int | None:
        """How much is there, once nothing is under way any more; None until then."""
        found = self.worker.lookup(NAMESPACE, keys)
        if found.num_pending:
            return None
        self.worker.release("transfer:t")
        return found.num_held

    def held_when_settled(self, keys: list[bytes]) -> int:
        """The same, waited for; that is bounded."""
        deadline = time.monotonic() + FETCH_BOUND_SECONDS
        while (held := self.settled(keys)) is None:
            assert time.monotonic() < deadline, "still under way"
            time.sleep(0.02)
        return held

    def check_bytes(self, keys: list[bytes]) -> None:
        slab = self.slab()
        refs = self.worker.prepare_load("load:check", NAMESPACE, keys)
        assert len(refs) == len(keys)
        for key, ref in zip(keys, refs, strict=True):
            assert slab.read_block(ref.slot, ref.generation, key) == content(key)
        self.worker.release("load:check")
        slab.close()

    def fetch_until_there(self, holder: HolderRef, keys: list[bytes]) -> float:
        """As workers do: another request asks again. A breaker may be open for a while.

        Returns the seconds that the try took which succeeded.
        """
        deadline = time.monotonic() + RECOVERY_SECONDS
        while True:
            began = time.monotonic()
            self.begin(holder, keys)
            if self.held_when_settled(keys) == len(keys):
                break
            assert time.monotonic() < deadline, "no recovery"
            time.sleep(0.5)
        took = time.monotonic() - began
        self.check_bytes(keys)
        return took


def content(key: bytes) -> bytes:
    return (key * (SPEC.block_bytes // len(key) + 1))[: SPEC.block_bytes]


def new_chain(num_blocks: int) -> list[bytes]:
    """Keys that nobody has asked for before."""
    start = next(_numbers) * 100_000
    tokens = list(range(start, start + 64 * num_blocks))
    return [bytes(key) for key in block_hashes(root_hash(NAMESPACE, None, None), tokens, 64)]


@contextmanager
def agents(num_hosts: int, folder: Path) -> Iterator[list[Node]]:
    """n1, n2, ...: one agent a host; they end with it."""
    with network(num_hosts) as hosts:
        made: list[Node] = []
        try:
            for index, host in enumerate(hosts, 1):
                made.append(_start(host, f"n{index}", folder))
            yield made
        finally:
            for node in made:
                node.worker.close()
                node.operator.close()
                node.process.terminate()
            for node in made:
                node.process.wait(20)


def _start(host: Host, name: str, folder: Path) -> Node:
    socket, log_file = folder / f"{name}.sock", folder / f"{name}.log"
    command = [
        sys.executable, "-m", "workers", "agent", "--node-id", name, "--socket", str(socket),
        "--tcp", f"{host.address}:7710", "--slab-name", f"perilune-{host.name}.slab",
        "--slab-bytes", str(SLAB_BYTES), "--block-tokens", "64",
        "--secret-folder", str(folder), "--transports", "tcp",
    ]  # fmt: skip
    with log_file.open("wb") as log:
        process = host.popen(command, stdout=log, stderr=log)
    worker = AgentClient(f"unix:{socket}", make_hello("worker", f"w-{name}", namespace=SPEC), 20.0)
    deadline = time.monotonic() + 60
    while True:
        try:
            worker.connect()
        except AgentUnavailableError:
            assert time.monotonic() < deadline, log_file.read_text()
            time.sleep(0.1)
        else:
            operator = AgentClient(f"unix:{socket}", make_hello("cli", "operator"), 20.0)
            return Node(host, process, worker, operator)
