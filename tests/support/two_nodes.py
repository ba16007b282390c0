"""Two nodes with an agent each, their emulated workers, and a gateway that follows both."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
from agent_process import AgentProcess

from controlplane.gateway.app import Gateway
from controlplane.gateway.settings import Settings
from controlplane.gateway.static import load_static
from workers.engines.emulated.fleet import Fleet
from workers.engines.emulated.worker import EngineConfig, WorkerSpec

MODEL = "tiny"
BLOCK_TOKENS = 64
WORKERS = {"p1": ("prefill", "n1"), "p2": ("prefill", "n2"), "d1": ("decode", "n2")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TwoNodes:
    """Agents n1 and n2, their workers, and a gateway that follows both."""

    def __init__(
        self, folder: Path, tokenizer: Path,
        workers: Mapping[str, tuple[str, str]] = WORKERS, more: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """`workers`: role and node of each; `more`: further options of the agents."""
        self.workers = workers
        self.folder, self.tokenizer = folder, tokenizer
        self.fleet: Any = None
        self.gateway: Any = None
        self.client = httpx2.AsyncClient(timeout=30, verify=False)
        self.agents = {}
        for node in ("n1", "n2"):
            (folder / node).mkdir()
            tcp = ("--tcp", f"127.0.0.1:{free_port()}", "--secret-folder", str(folder))
            self.agents[node] = AgentProcess(folder / node, node_id=node, more=(*tcp, *more))

    async def start(self) -> None:
        for agent in self.agents.values():
            agent.start()
        specs = [WorkerSpec(name, role, 0) for name, (role, _) in self.workers.items()]  # type: ignore[arg-type]
        config = EngineConfig(
            MODEL, str(self.tokenizer), prefill_ms_per_token=0.02, decode_ms=1.0, device_blocks=100
        )
        sockets = {name: self.agents[node].address for name, (_, node) in self.workers.items()}
        self.fleet = Fleet(specs, config, agents=sockets)
        await self.fleet.start()
        self.gateway = Gateway(Settings(port=0, static_view=str(self.view())))
        await self.gateway.start()

    async def stop(self) -> None:
        """What was started of it, in reverse."""
        await self.client.aclose()
        if self.gateway is not None:
            await self.gateway.stop(drain_seconds=1.0)
        if self.fleet is not None:
            await self.fleet.stop()
        for agent in self.agents.values():
            agent.close()

    def view(self, placement: str = "cost", **states: str) -> Path:
        workers = [
            {"id": name, "node_id": node, "role": role, "model": MODEL, "engine": "emulated",
             "url": self.fleet.urls[name], "state": states.get(name, "ready")}
            for name, (role, node) in self.workers.items()
        ]  # fmt: skip
        spec = {"placement": placement, "explore_share": 0}
        nodes = [{"id": n, "events_endpoint": a.address} for n, a in self.agents.items()]
        content = {
            "boot_id": "test", "nodes": nodes, "workers": workers,
            "models": [{"id": MODEL, "path": str(self.tokenizer)}],
            "policies": [{"kind": "scheduling", "scope": "default", "revision": 1, "spec": spec}],
        }  # fmt: skip
        path = self.folder / "view.json"
        path.write_text(json.dumps(content))
        return path

    def set(self, placement: str, **states: str) -> None:
        self.gateway.cluster.apply(load_static(str(self.view(placement, **states))))

    async def ask(self, prompt: list[int]) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        reply = await self.client.post(f"{self.gateway.url}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text

    async def compute(self, worker: str, prompt: list[int]) -> None:
        """A prefill that the gateway knows nothing of: its blocks lie on that node alone."""
        ours = {"transfer_id": "seed", "leg": "prefill"}
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": 1,
            "kv_transfer_params": {"perilune": ours},
        }  # fmt: skip
        url = f"{self.fleet.urls[worker]}/v1/completions"
        reply = await self.client.post(url, json=body)
        assert reply.status_code == 200, reply.text
        self.agents[self.workers[worker][1]].client.release("transfer:seed")

    def knows(self, node: str, blocks: int) -> bool:
        index = self.gateway.cluster.index
        return bool(index.num_blocks() >= blocks and node in self.gateway.cluster.paths.holders)

    async def ready(self, eventually: Callable[..., Any]) -> None:
        paths = self.gateway.cluster.paths
        await eventually(lambda: paths.costs.keys() >= {"n1", "n2"}, "paths between both nodes")
        workers = self.gateway.cluster.workers.values()
        await eventually(lambda: all(w.namespace is not None for w in workers), "namespaces")


def prompt(seed: int, tokens: int = 8 * BLOCK_TOKENS + 10) -> list[int]:
    return [(seed * 7919 + i * 31) % 399 for i in range(tokens)]
