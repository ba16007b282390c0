"""What tests do with a real agent, as a connector would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fetching import Node
from heartbeats import ControlPlane

from workers.client import AgentClient
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import StoredSlot
from workers.core.stats_messages import NamespaceSpec, TierStats
from workers.pool.arena import Slab

PATIENCE_SECONDS = 30.0


@dataclass
class Tenant:
    """One worker of an agent that has two tiers."""

    client: AgentClient
    spec: NamespaceSpec
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.namespace = namespace_digest(self.spec)
        self.attach()

    def attach(self) -> None:
        welcome = self.client.connect()
        self.slab = Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)

    def chain(self, name: str, num_blocks: int = 8) -> list[bytes]:
        root = root_hash(self.namespace, name, None)
        return [*block_hashes(root, range(64 * num_blocks), 64)]

    def payload(self, key: bytes) -> bytes:
        return key * (self.spec.block_bytes // len(key))

    def store(self, keys: Sequence[bytes], tenant: str = "") -> int:
        """Stored and let go; how many were new."""
        self.numbers.append(len(self.numbers))
        owner = f"transfer:{self.client.address}:{len(self.numbers)}"
        reply = self.client.prepare_store(owner, self.namespace, b"", keys, tenant=tenant)
        slots = [(ref, key) for ref, key in zip(reply.slots, keys, strict=True) if ref is not None]
        write = self.slab.write_block
        stored = [
            StoredSlot(r.slot, r.generation, write(r.slot, r.generation, key, self.payload(key)))
            for r, key in slots
        ]
        num_stored = self.client.complete_store(owner, stored)
        self.client.release(owner)
        return num_stored

    def held(self, keys: Sequence[bytes]) -> int:
        """Blocks of the prefix that the node has, in whatever tier."""
        reply = self.client.lookup(self.namespace, keys)
        return reply.num_held + reply.num_on_disk

    def bring_back(self, keys: Sequence[bytes], owner: str = "load:w:1") -> None:
        """Promote until nothing of the chain is on its way any more."""
        reply = self.client.promote(owner, self.namespace, keys)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while reply.num_on_disk:
            assert time.monotonic() < deadline, reply
            time.sleep(0.005)
            reply = self.client.lookup(self.namespace, keys)

    def load(self, keys: Sequence[bytes], owner: str = "load:w:1") -> list[bytes | None]:
        """Promoted, pinned, read, let go."""
        self.bring_back(keys, owner)
        refs = self.client.prepare_load(owner, self.namespace, keys)
        data = [self.slab.read_block(r.slot, r.generation, k) for r, k in zip(refs, keys)]  # noqa: B905
        self.client.release(owner)
        return data

    def ssd(self) -> TierStats:
        return self.client.stats().tiers[1]

    def eventually(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < deadline, self.client.stats()
            time.sleep(0.01)

    def fill(self, name: str, num_chains: int, num_blocks: int = 8) -> list[list[bytes]]:
        """Chain after chain, no faster than the disk takes them; all are held then."""
        chains = [self.chain(f"{name}{i}", num_blocks) for i in range(num_chains)]
        for keys in chains:
            self.store(keys)
            self.eventually(self.is_calm)
        return chains

    def is_calm(self) -> bool:
        """Nothing moves, and the reserve of free slots is there."""
        stats = self.client.stats()
        dram, ssd = stats.tiers
        busy = dram.used_blocks > dram.capacity_blocks - max(1, dram.capacity_blocks // 16)
        return not busy and not stats.write_queue_blocks and ssd.state != "rebuilding"


@pytest.fixture
def make_tenant(spec: NamespaceSpec) -> Callable[..., Tenant]:
    """`make_tenant(agent)`: a worker of it."""

    def make(agent: Any, client_id: str = "w") -> Tenant:
        made = Tenant(agent.worker(client_id, spec), spec)
        made.eventually(
            lambda: len(made.client.stats().tiers) == 1 or made.ssd().capacity_blocks > 0
        )
        return made

    return make


@pytest.fixture
def control_plane() -> Iterator[ControlPlane]:
    made = ControlPlane()
    yield made
    made.close()


@pytest.fixture
def make_node(
    make_agent: Callable[..., Any],
    free_port: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Node]:
    """A node of one cluster: an agent that has started, with these transports, and its worker."""
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))

    def make(name: str, transports: str, *options: str, **sizes: int) -> Node:
        port = free_port()
        agent = make_agent(
            "--node-id", name, "--tcp", f"127.0.0.1:{port}", "--secret-folder", str(tmp_path),
            "--transports", transports, *options, **sizes,
        )  # fmt: skip
        agent.start()
        return Node(agent, agent.worker(f"w-{name}"), port)

    return make


@pytest.fixture
def make_following_pair(
    control_plane: ControlPlane, make_node: Callable[..., Node]
) -> Callable[[str], tuple[Node, Node]]:
    """Two agents with these transports that do what `control_plane` tells them."""

    def make(transports: str) -> tuple[Node, Node]:
        follows = ("--control-plane", control_plane.url, "--heartbeat-seconds", "0.1")
        return make_node("n1", transports, *follows), make_node("n2", transports, *follows)

    return make
