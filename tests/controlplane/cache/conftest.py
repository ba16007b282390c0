"""Real node agents in the test's own loop, known to a control plane whose jobs the test runs."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controlplane.loops.jobs import JobRunner
from workers.agent.heartbeat import to_jsonable
from workers.agent.server import serve
from workers.agent.settings import AgentSettings
from workers.client import AsyncAgentClient, make_hello
from workers.clock import SystemClock
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import (
    CompleteStore,
    Done,
    Lookup,
    LookupReply,
    PinPrefix,
    PreparedLoad,
    PreparedStore,
    PrepareLoad,
    PrepareStore,
    StoredSlot,
)
from workers.core.stats_messages import NamespaceSpec
from workers.pool.arena import Slab

BLOCK_TOKENS = 64


def make_spec(version: str = "1", page_bytes: int = 4096) -> NamespaceSpec:
    return NamespaceSpec(
        model_id="tiny",
        weights_version=version,
        kv_dtype="bfloat16",
        page_layout="LBHNC",
        isa="vec",
        page_bytes=(page_bytes, page_bytes),
        engine_block_tokens=32,
        block_tokens=BLOCK_TOKENS,
        tp_size=1,
        rank_layout="tp1",
    )


def content(key: bytes, num_bytes: int) -> bytes:
    """What a block of this key holds."""
    return (key * (num_bytes // len(key) + 1))[:num_bytes]


@dataclass
class Worker:
    """A worker of one namespace on one node."""

    client: AsyncAgentClient
    spec: NamespaceSpec
    slab: Slab | None = None
    namespace: bytes = b""

    async def join(self) -> Worker:
        self.namespace = namespace_digest(self.spec)
        await self.client.stats()
        welcome = self.client.welcome
        assert welcome is not None
        self.slab = Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)
        return self

    def chain(self, name: str, num_blocks: int, tenant: str = "") -> list[bytes]:
        """Chains of one name share their heads."""
        root = root_hash(self.namespace, tenant or None, None)
        tokens = [hash_of(name) + i for i in range(BLOCK_TOKENS * num_blocks)]
        return [*block_hashes(root, tokens, BLOCK_TOKENS)]

    def branch(self, parent: bytes, name: str, num_blocks: int) -> list[bytes]:
        tokens = [hash_of(name) + i for i in range(BLOCK_TOKENS * num_blocks)]
        return [*block_hashes(parent, tokens, BLOCK_TOKENS)]

    async def store(self, keys: list[bytes], parent: bytes = b"", tenant: str = "") -> int:
        assert self.slab is not None
        body = PrepareStore("store:w", self.namespace, parent, keys, tenant)
        reply = await self.client.call(body, PreparedStore)
        stored = []
        for ref, key in zip(reply.slots, keys, strict=True):
            if ref is not None:
                data = content(key, self.spec.block_bytes)
                checksum = self.slab.write_block(ref.slot, ref.generation, key, data)
                stored.append(StoredSlot(ref.slot, ref.generation, checksum))
        count = (await self.client.call(CompleteStore("store:w", stored), Done)).count
        await self.client.release("store:w")
        return count

    async def held(self, keys: list[bytes]) -> int:
        return (await self.client.call(Lookup(self.namespace, keys), LookupReply)).num_held

    async def load(self, keys: list[bytes], owner: str = "load:w:1") -> list[bytes | None]:
        """The blocks' bytes, pinned until `release`."""
        assert self.slab is not None
        refs = (
            await self.client.call(PrepareLoad(owner, self.namespace, keys), PreparedLoad)
        ).slots
        return [
            self.slab.read_block(ref.slot, ref.generation, key)
            for ref, key in zip(refs, keys, strict=False)
        ]

    async def hold(self, keys: list[bytes], owner: str = "transfer:1") -> int:
        return (await self.client.call(PinPrefix(owner, self.namespace, keys), Done)).count


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[-3:], "little")


@dataclass
class RunningAgent:
    """An agent in this loop."""

    node_id: str
    settings: AgentSettings
    stop: asyncio.Event
    task: asyncio.Task[None]
    clients: list[AsyncAgentClient] = field(default_factory=list)

    async def worker(self, spec: NamespaceSpec | None = None, name: str = "w1") -> Worker:
        found = spec or make_spec()
        client = self.client(make_hello("worker", name, namespace=found))
        return await Worker(client, found).join()

    def client(self, hello: Any = None) -> AsyncAgentClient:
        client = AsyncAgentClient(
            self.settings.endpoint, hello or make_hello("cli", "test"), timeout_seconds=20
        )
        self.clients.append(client)
        return client

    async def end(self) -> None:
        for client in self.clients:
            await client.close()
        self.stop.set()
        await self.task


@dataclass
class Cluster:
    """A control plane and its agents."""

    api: Any
    runner: JobRunner
    folder: Path
    agents: dict[str, RunningAgent] = field(default_factory=dict)

    async def agent(self, node_id: str = "n1", **changes: Any) -> RunningAgent:
        settings = AgentSettings(
            **{
                "node_id": node_id,
                "socket": self.folder / f"{node_id}.sock",
                "slab_name": f"perilune-test-{uuid.uuid4().hex[:12]}.slab",
                "slab_bytes": 1 << 20,
                "block_tokens": BLOCK_TOKENS,
                **changes,
            }
        )
        stop = asyncio.Event()
        task = asyncio.create_task(serve(settings, SystemClock(), stop))
        agent = RunningAgent(node_id, settings, stop, task)
        async with asyncio.timeout(20):
            while not settings.socket.exists():
                assert not task.done(), "the agent did not start"
                await asyncio.sleep(0.01)
        self.agents[node_id] = agent
        return agent

    async def heartbeat(self, node_id: str = "n1") -> None:
        """What the agent would report of itself."""
        agent = self.agents[node_id]
        client = agent.client()
        stats = await client.stats()
        await client.close()
        body = {
            "incarnation": stats.incarnation,
            "events_endpoint": agent.settings.endpoint,
            "pool_stats": to_jsonable(stats),
        }
        reply = await self.api.http.post(f"/api/v1/nodes/{node_id}/heartbeat", json=body)
        assert reply.status_code == 200, reply.text

    async def post(self, verb: str, status: int = 202, **body: Any) -> Any:
        reply = await self.api.http.post(f"/api/v1/cache/{verb}", json=body)
        assert reply.status_code == status, reply.text
        return reply.json() if status != 202 else reply.json()["job"]

    async def run(self, verb: str, **body: Any) -> Any:
        """Ask for an operation, let it end, and give the job as it is then."""
        job = await self.post(verb, **body)
        return await self.finish(job["id"])

    async def finish(self, job_id: int) -> Any:
        async with asyncio.timeout(60):
            await self.runner.step()
            await self.runner.wait()
        return await self.job(job_id)

    async def job(self, job_id: int) -> Any:
        return await self.api.get(f"/jobs/{job_id}")

    async def end(self) -> None:
        await self.runner.close()
        for agent in self.agents.values():
            with contextlib.suppress(asyncio.CancelledError):
                await agent.end()


@pytest.fixture
async def cluster(api: Any, tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(api, JobRunner(api.plane), tmp_path)
    try:
        yield made
    finally:
        await made.end()


@pytest.fixture
def block_content() -> Callable[[bytes, int], bytes]:
    return content


@pytest.fixture
def spec_with() -> Callable[..., NamespaceSpec]:
    return make_spec
