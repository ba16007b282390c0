"""One prefill and one decode engine of real vLLM, side by side, around one real node agent.

The engines run in float32 with small chunks and a small device cache, so that chunked prefill,
eviction and preemption happen with short prompts. They start once for all tests of this folder.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.client import AgentClient, make_hello
from workers.core.errors import AgentUnavailableError
from workers.core.stats_messages import PoolStats
from workers.data_dir import default_data_dir
from workers.engines.vllm import PROJECT_ROOT, VllmWorkerSpec
from workers.models import smollm2
from workers.process import die_with_parent

BLOCK = 32
VOCABULARY = 49_000
START_SECONDS = 900.0
ANSWER_SECONDS = 100.0
SLAB_BYTES = 640 << 20
SSD_BYTES = 2 << 30
_SERIES = re.compile(r"^((?:vllm|perilune)[\w:]+)(\{[^}]*\})? ([\d.e+-]+)$", re.MULTILINE)


@dataclass
class Engine:
    """A vLLM worker process and how to talk to it."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        status, payload = self.request("POST", path, body)
        assert status == 200, f"{self.name} {path}: {status} {payload[:500]!r}"
        answer: dict[str, Any] = json.loads(payload or b"{}")
        return answer

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Series summed over labels; prompt tokens also by source."""
        _, text = self.request("GET", "/metrics")
        sums: dict[str, float] = {}
        for name, labels, value in _SERIES.findall(text.decode()):
            sums[name] = sums.get(name, 0.0) + float(value)
            if source := re.search(r'source="(\w+)"', labels):
                sums[f"{name}/{source[1]}"] = float(value)
        return sums

    def empty_device_cache(self) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self.post("/reset_prefix_cache").get("success", True):
            assert time.monotonic() < deadline, f"{self.name}: its blocks stay in use"
            time.sleep(0.1)

    def pids(self) -> list[int]:
        """The API server and everything under it."""
        found, queue = [], [self.process.pid]
        while queue:
            pid = queue.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    queue += [int(child) for child in task.read_text().split()]
                except OSError:
                    continue
        return found


@dataclass(frozen=True)
class Answer:
    """Both legs of one request."""

    text: str
    num_blocks: int
    prefill: dict[str, Any]  # what leg 1 said of itself
    ttft_like_seconds: float
    decode_delta: dict[str, float]


@dataclass
class Cluster:
    folder: Path
    prefill: Engine
    decode: Engine
    agent: subprocess.Popen[bytes] | None = None
    client: AgentClient | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    num_transfers: int = 0

    # --- the agent ------------------------------------------------------------------------

    def start_agent(self) -> None:
        self.agent = start_agent(self.folder)
        self.close_client()
        self.client = agent_client(self.folder)

    def worker_client(self) -> AgentClient:
        """A further worker of the engines' namespace, to be closed by the test."""
        spec = self.stats().namespaces[0].spec
        hello = make_hello("worker", "by-hand", namespace=spec)
        client = AgentClient(str(self.folder / "n1.sock"), hello, 20.0)
        client.connect()
        return client

    def close_client(self) -> None:
        if self.client is not None:
            self.client.close()

    def kill_agent(self) -> None:
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait(30)

    def stats(self) -> PoolStats:
        deadline = time.monotonic() + 30
        while True:
            try:
                assert self.client is not None
                return self.client.stats()
            except AgentUnavailableError:
                assert time.monotonic() < deadline, "the agent does not answer"
                time.sleep(0.1)

    def wait_stats(self, accept: Callable[[PoolStats], bool], what: str) -> PoolStats:
        deadline = time.monotonic() + 60
        while not accept(stats := self.stats()):
            assert time.monotonic() < deadline, f"{what}: {stats}"
            time.sleep(0.1)
        return stats

    def wait_workers(self, count: int = 2) -> None:
        """Until this many workers have brought their namespace to the agent."""

        def joined(stats: PoolStats) -> bool:
            return sum(len(item.workers) for item in stats.namespaces) >= count

        self.wait_stats(joined, "workers that joined")

    @staticmethod
    def body(tokens: Sequence[int], max_tokens: int, **transfer: Any) -> dict[str, Any]:
        content: dict[str, Any] = {
            "model": "smollm2",
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if transfer:
            content["kv_transfer_params"] = {"perilune": transfer}
        return content

    # --- requests -------------------------------------------------------------------------

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(200, VOCABULARY) for _ in range(count)]

    def transfer_id(self) -> str:
        self.num_transfers += 1
        return f"transfer-{self.num_transfers}"

    def leg_one(self, tokens: Sequence[int], transfer_id: str, **fields: Any) -> dict[str, Any]:
        reply = self.prefill.post(
            "/v1/completions",
            self.body(tokens, 1, transfer_id=transfer_id, leg="prefill") | fields,
        )
        params: dict[str, Any] = reply["kv_transfer_params"]["perilune"]
        return params

    def leg_two(
        self,
        tokens: Sequence[int],
        transfer_id: str,
        num_blocks: int,
        max_tokens: int,
        **fields: Any,
    ) -> dict[str, Any]:
        transfer = {"transfer_id": transfer_id, "leg": "decode", "num_blocks": num_blocks}
        return self.decode.post(
            "/v1/completions", self.body(tokens, max_tokens, **transfer) | fields
        )

    def ask(self, tokens: Sequence[int], max_tokens: int = 8, **fields: Any) -> Answer:
        """Both legs, as the gateway does them, its release included."""
        transfer_id = self.transfer_id()
        said = self.leg_one(tokens, transfer_id, **fields)
        before = self.decode.metrics()
        began = time.monotonic()
        reply = self.leg_two(tokens, transfer_id, said["num_blocks"], max_tokens, **fields)
        seconds = time.monotonic() - began
        self.release(transfer_id)
        after = self.decode.metrics()
        delta = {name: value - before.get(name, 0.0) for name, value in after.items()}
        return Answer(reply["choices"][0]["text"], said["num_blocks"], said, seconds, delta)

    def release(self, transfer_id: str) -> None:
        assert self.client is not None
        with contextlib.suppress(AgentUnavailableError):  # then nothing is left to release
            self.client.release(f"transfer:{transfer_id}")

    def reference(self, tokens: Sequence[int], num_held: int, max_tokens: int = 8) -> str:
        """The text of an engine that holds just these tokens in its own device cache.

        A salt of its own keeps the pool out: nothing was ever stored under it.
        """
        salt = f"reference-{self.rng.random()}"
        if num_held:
            self.prefill.post(
                "/v1/completions", self.body(tokens[:num_held], 1) | {"cache_salt": salt}
            )
        before = self.prefill.metrics()
        reply = self.prefill.post(
            "/v1/completions", self.body(tokens, max_tokens) | {"cache_salt": salt}
        )
        after = self.prefill.metrics()
        hits = "vllm:external_prefix_cache_hits_total"
        assert after[hits] == before[hits], "the reference must not come from the pool"
        text: str = reply["choices"][0]["text"]
        return text


def agent_client(folder: Path) -> AgentClient:
    return AgentClient(str(folder / "n1.sock"), make_hello("cli", "tests"))


def start_agent(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "workers", "agent", "--node-id", "n1"]
    command += ["--socket", str(folder / "n1.sock"), "--block-tokens", str(BLOCK)]
    command += ["--slab-name", f"perilune-test-{os.getpid()}.slab"]
    command += ["--slab-bytes", str(SLAB_BYTES), "--lease-seconds", "120"]
    command += ["--ssd-path", str(folder / "ssd"), "--ssd-bytes", str(SSD_BYTES)]
    with (folder / "agent.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=PROJECT_ROOT)


def start_engine(folder: Path, role: str, port: int, model: Path) -> Engine:
    spec = VllmWorkerSpec(
        worker_id=role[0] + "1",
        role=role,  # type: ignore[arg-type]
        model=str(model),
        served_name="smollm2",
        port=port,
        engine_python=sys.executable,
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=512,
        cpu_binding="0" if os.cpu_count() == 1 else "0-1",
        agent_socket=str(folder / "n1.sock"),
        block_tokens=BLOCK,
        model_id=smollm2.MODEL_ID,
        weights_version="test",
        dev_mode=True,
        extra_args=("--num-gpu-blocks-override", "66"),
        # This box is shared: patience keeps a slow answer from looking like a dead agent.
        connector_settings={"call_timeout_seconds": 1.0},
    )
    log = folder / f"{role}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            spec.command(),
            env={**os.environ, **spec.environment()},
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            preexec_fn=die_with_parent,  # a test run that is killed leaves no engine
        )
    return Engine(role, port, process, log)


def wait_ready(engines: Sequence[Engine]) -> None:
    deadline = time.monotonic() + START_SECONDS
    for engine in engines:
        while True:
            try:
                if engine.request("GET", "/v1/models")[0] == 200:
                    break
            except OSError:
                pass
            last = "\n".join(engine.log.read_text(errors="replace").splitlines()[-25:])
            assert engine.process.poll() is None, f"{engine.name} ended:\n{last}"
            assert time.monotonic() < deadline, f"{engine.name} does not get ready:\n{last}"
            time.sleep(0.5)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def end_engine(engine: Engine) -> None:
    """Its resource tracker is the last to go, once it has removed what the others left."""
    family = [psutil.Process(pid) for pid in engine.pids() if psutil.pid_exists(pid)]
    end(engine.process)
    _, alive = psutil.wait_procs(family, timeout=20)
    for process in alive:
        process.kill()


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("vllm")
    model = smollm2.prepare(default_data_dir()).path
    agent = start_agent(folder)
    engines: list[Engine] = []
    cluster: Cluster | None = None
    try:
        for role in ("prefill", "decode"):
            engines.append(start_engine(folder, role, _free_port(), model))
        wait_ready(engines)
        cluster = Cluster(folder, *engines, agent=agent, client=agent_client(folder))
        cluster.wait_workers()
        yield cluster
    finally:
        if cluster is not None:
            cluster.close_client()
        for engine in engines:
            end_engine(engine)
        end(cluster.agent if cluster is not None and cluster.agent is not None else agent)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
