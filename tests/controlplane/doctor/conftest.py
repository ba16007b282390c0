"""Two real agents of one cluster, on loopback, in the test's own loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from workers.agent.server import serve
from workers.agent.settings import AgentSettings
from workers.client import AsyncAgentClient, make_hello
from workers.clock import SystemClock
from workers.cluster_secret import load_secret
from workers.core.stats_messages import NamespaceSpec

SPEC = NamespaceSpec(
    "tiny", "1", "bf16", "LBHNC", "vec", (131_072, 131_072), 32, 64, 1, "tp1"
)  # 512 KiB a block
MakeAgents = Callable[..., Awaitable[list[AgentSettings]]]


@pytest.fixture
async def make_agents(
    tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeAgents]:
    """`await make_agents(**settings)`: n1 and n2, each with a worker of one model."""
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))
    secret, stop = load_secret(tmp_path), asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    clients: list[AsyncAgentClient] = []
    (tmp_path / "run").mkdir()

    async def start(name: str, **changes: Any) -> AgentSettings:
        settings = AgentSettings(
            **{
                "node_id": name,
                "socket": tmp_path / "run" / f"{name}.sock",
                "slab_name": f"perilune-test-{uuid.uuid4().hex[:12]}.slab",
                "slab_bytes": 32 << 20,
                "block_tokens": 64,
                "tcp_host": "127.0.0.1",
                "tcp_port": free_port(),
                "secret": secret,
                "heartbeat_seconds": 0.1,
                **changes,
            }
        )
        tasks.append(asyncio.create_task(serve(settings, SystemClock(), stop)))
        async with asyncio.timeout(30):
            while not settings.socket.exists():
                assert not tasks[-1].done(), "the agent did not start"
                await asyncio.sleep(0.01)
        worker = make_hello("worker", f"w-{name}", namespace=SPEC)
        clients.append(AsyncAgentClient(settings.endpoint, worker, 20.0))
        await clients[-1].stats()
        return settings

    async def make(**changes: Any) -> list[AgentSettings]:
        return [await start(name, **changes) for name in ("n1", "n2")]

    try:
        yield make
    finally:
        for client in clients:
            await client.close()
        stop.set()
        await asyncio.gather(*tasks)
