"""A cluster over several hosts: control plane and gateway on the first, a worker on each other one.

The thread that makes one is on the first host from then on, where it asks gateway and control plane;
agents are asked over their Unix sockets as well, which no fault of the network touches.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx2
import msgspec
import psutil
from live_cluster import BLOCK_TOKENS, DTYPE, wait_for
from network import Host, network
from node_supervisor import MAX_MODEL_LEN, HostShare

from workers.client import AgentClient, make_hello
from workers.cluster_secret import load_secret
from workers.core.stats_messages import PoolStats
from workers.supervisor.home import Home, ensure_token
from workers.supervisor.registration import kv_bytes_per_token

MODEL = "smollm2"
END_SECONDS = 90


@dataclass
class Node:
    """A host with an agent and a worker, and the supervisor of both."""

    host: Host
    share: HostShare
    process: subprocess.Popen[bytes]
    operator: AgentClient

    def stats(self) -> PoolStats:
        return self.operator.stats()

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:8101"

    @property
    def agent_pid(self) -> int:
        children = psutil.Process(self.process.pid).children()
        return int(next(child.pid for child in children if "--slab-name" in child.cmdline()))

    def end(self) -> None:
        """In order: worker, then agent; the slab is gone afterwards."""
        self.operator.close()
        self.process.terminate()
        self.process.wait(END_SECONDS)
        assert self.process.stdin is not None
        self.process.stdin.close()


@dataclass
class NetCluster:
    """Asked from the first host. `nodes` by node id."""

    folder: Path
    hosts: list[Host]
    client: httpx2.Client
    token: str
    engine: Literal["vllm", "emulated"]
    model_folder: Path
    slab_bytes: int
    nodes: dict[str, Node] = field(default_factory=dict)

    @property
    def gateway(self) -> str:
        return f"http://{self.hosts[0].address}:8000"

    @property
    def control_plane(self) -> str:
        return f"http://{self.hosts[0].address}:7700"

    # --- nodes --------------------------------------------------------------------------------

    def start_node(self, node_id: str, role: Literal["prefill", "decode"], host: Host) -> Node:
        """Its worker is p1 or d1."""
        share = HostShare(
            node_id=node_id, worker_id=f"{role[0]}1", role=role, address=host.address,
            control_plane=self.control_plane, folder=str(self.folder),
            slab=f"perilune-{host.name}-{secrets.token_hex(2)}.slab", slab_bytes=self.slab_bytes,
            model_folder=str(self.model_folder), engine=self.engine, block_tokens=BLOCK_TOKENS,
            dtype=DTYPE,
        )  # fmt: skip
        program = Path(__file__).with_name("node_supervisor.py")
        with (self.folder / "logs" / f"supervisor-{node_id}.log").open("ab") as log:
            process = host.popen(
                [sys.executable, str(program), msgspec.json.encode(share).decode()],
                stdin=subprocess.PIPE, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip
        operator = AgentClient(f"unix:{share.socket}", make_hello("cli", "tests"), 20.0)
        self.nodes[node_id] = node = Node(host, share, process, operator)
        return node

    def wait_serving(self, seconds: float) -> None:
        """Until every node's worker is ready. RuntimeError: one of them cannot start."""

        def ready() -> bool:
            rows = self.items("/workers")
            for row in rows:
                if row["state"] == "failed" and row["restarts"]:
                    raise RuntimeError(f"{row['id']} does not start: {row['last_error']}")
            wanted = {node.share.worker_id for node in self.nodes.values()}
            return {row["id"] for row in rows if row["state"] == "ready"} == wanted

        wait_for(ready, seconds, f"workers that are ready (see {self.folder / 'logs'})")

    def ready_workers(self) -> set[str]:
        return {row["id"] for row in self.items("/workers") if row["state"] == "ready"}

    def worker(self, worker_id: str) -> dict[str, Any]:
        return next(row for row in self.items("/workers") if row["id"] == worker_id)

    # --- questions ----------------------------------------------------------------------------

    def get(self, path: str, **params: str | int) -> Any:
        headers = {"authorization": f"Bearer {self.token}"}
        reply = self.client.get(
            f"{self.control_plane}/api/v1{path}", params=params, headers=headers
        )
        reply.raise_for_status()
        return reply.json()

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        headers = {"authorization": f"Bearer {self.token}"}
        return self.client.post(
            f"{self.control_plane}/api/v1{path}", json=body or {}, headers=headers
        )

    def items(self, path: str, **params: str | int) -> list[dict[str, Any]]:
        payload = self.get(path, **params)
        rows: list[dict[str, Any]] = payload["items"] if isinstance(payload, dict) else payload
        return rows

    def complete(
        self, prompt: str, max_tokens: int = 8, client: httpx2.Client | None = None
    ) -> httpx2.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return (client or self.client).post(f"{self.gateway}/v1/completions", json=body)

    def decision(self, reply: httpx2.Response) -> dict[str, Any]:
        """The finished record of a request, with what its decode leg said."""
        request_id = reply.headers["x-request-id"]

        def read() -> dict[str, Any] | None:
            record: dict[str, Any] = self.get(f"/decisions/{request_id}")
            return record if record["status"] != "running" and record["decode_leg"] else None

        return wait_for(read, 20, f"a finished record of {request_id}")

    def moved(self, mode: str = "") -> int:
        """Bytes from n1 to n2 as the agents say now: what n2 pulled, and what n1 pushed."""
        return sum(
            pair.bytes_total
            for node in self.nodes.values()
            for pair in node.stats().transfers.pairs
            if (pair.source, pair.destination) == ("n1", "n2") and mode in ("", pair.mode)
        )

    def transfer_mode(self, mode: Literal["auto", "pull", "push"]) -> None:
        """How blocks go from node to node from now on."""
        path = "/policies/transfer/default"
        live = self.get(path)
        headers = {
            "authorization": f"Bearer {self.token}", "if-match": f'"{live["revision"]}"'
        }  # fmt: skip
        body = {"spec": {**live["spec"], "mode": mode}, "reason": "test"}
        url = f"{self.control_plane}/api/v1{path}"
        self.client.put(url, json=body, headers=headers).raise_for_status()


@contextmanager
def net_cluster(
    folder: Path, model_folder: Path, engine: Literal["vllm", "emulated"], *,
    num_hosts: int = 3, slab_bytes: int = 64 << 20, seconds: float = 60,
) -> Iterator[NetCluster]:  # fmt: skip
    """Host 1: control plane and gateway; host 2: n1 with p1; host 3: n2 with d1; others are spare.

    It is handed out while the nodes still start: `wait_serving`.
    """
    home = Home(folder)
    home.create()
    load_secret(folder)
    with ExitStack() as stack:
        hosts = stack.enter_context(network(num_hosts))
        stack.enter_context(hosts[0].entered())
        client = stack.enter_context(httpx2.Client(timeout=120, trust_env=False))
        token = ensure_token(home.token_file)
        cluster = NetCluster(folder, hosts, client, token, engine, model_folder, slab_bytes)
        stack.callback(_end_nodes, cluster)
        cluster.start_node("n1", "prefill", hosts[1])
        cluster.start_node("n2", "decode", hosts[2])
        _start_front(stack, cluster)
        _register_model(cluster, seconds)
        yield cluster


def _end_nodes(cluster: NetCluster) -> None:
    for node in cluster.nodes.values():
        node.process.terminate()  # together: an engine's end takes seconds
    for node in cluster.nodes.values():
        node.end()


def _start_front(stack: ExitStack, cluster: NetCluster) -> None:
    host, home = cluster.hosts[0], Home(cluster.folder)
    token = ("--token-file", str(home.token_file))
    for name, *words in (
        ("control-plane", "controlplane", "--port", "7700", "--data", str(home.data), *token),
        ("gateway", "controlplane.gateway", "--port", "8000", "--control-plane",
         cluster.control_plane, *token),
    ):  # fmt: skip
        with home.log_file(name).open("ab") as log:
            process = host.popen(
                [sys.executable, "-m", *words, "--host", host.address],
                stdout=log, stderr=log, env={**os.environ, "PERILUNE_HOME": str(home.data)},
            )  # fmt: skip
        stack.callback(process.wait, END_SECONDS)
        stack.callback(process.terminate)


def _register_model(cluster: NetCluster, seconds: float) -> None:
    folder = str(cluster.model_folder)
    body = {
        "path": folder, "max_model_len": MAX_MODEL_LEN,
        "kv_bytes_per_token": kv_bytes_per_token(folder, DTYPE),
    }  # fmt: skip
    headers = {"authorization": f"Bearer {cluster.token}"}

    def register() -> bool:
        url = f"{cluster.control_plane}/api/v1/models/{MODEL}"
        reply = cluster.client.put(url, json=body, headers=headers)
        assert reply.status_code < 300, reply.text
        return True

    wait_for(register, seconds, "the control plane to take the model")


def text_of(reply: httpx2.Response) -> str:
    """The answer of a completion. A 200 with nothing in it is none."""
    assert reply.status_code == 200, reply.text
    text: str = json.loads(reply.content)["choices"][0]["text"]
    assert text
    return text


def served_tokens(record: dict[str, Any]) -> int:
    """What the decode leg did not compute."""
    leg = record["decode_leg"]
    return int(leg["device_hit_tokens"]) + int(leg["pool_hit_tokens"])


def until_moved(
    cluster: NetCluster, prompts: Iterator[str], mode: str = "", seconds: float = 90
) -> dict[str, Any]:
    """Ask new things until one's blocks come from the other node: the record of that one."""
    deadline = time.monotonic() + seconds
    while True:
        before = cluster.moved(mode)
        reply = cluster.complete(next(prompts))
        record = cluster.decision(reply) if reply.status_code == 200 else {}
        if record and cluster.moved(mode) > before and record["decode_leg"]["pool_hit_tokens"]:
            return record
        assert time.monotonic() < deadline, f"nothing comes any more: {record or reply.text}"
        time.sleep(0.3)
