"""A real node agent in a process of its own, and namespaces to bring to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from shared_memory import remove_slab

from workers.client import AgentClient, make_hello
from workers.core.errors import AgentUnavailableError
from workers.core.messages import ClientRole, Hello, Welcome
from workers.core.stats_messages import NamespaceSpec

BLOCK_TOKENS = 64
START_SECONDS = 30.0


def make_spec(**changes: object) -> NamespaceSpec:
    """A small model: 16 KiB a block."""
    values: dict[str, object] = {
        "model_id": "tiny",
        "weights_version": "1",
        "kv_dtype": "bfloat16",
        "page_layout": "LBHNC",
        "isa": "vec",
        "page_bytes": (4096, 4096),
        "engine_block_tokens": 32,
        "block_tokens": BLOCK_TOKENS,
        "tp_size": 1,
        "rank_layout": "tp1",
    }
    return NamespaceSpec(**(values | changes))  # type: ignore[arg-type]


@dataclass
class AgentProcess:
    """`start` it, use `client`s; all of it ends with the test."""

    folder: Path
    extra: tuple[str, ...] = ()
    slab_bytes: int = 1 << 20
    slab_name: str = field(default_factory=lambda: f"perilune-test-{uuid.uuid4().hex[:12]}.slab")
    process: subprocess.Popen[bytes] | None = None
    clients: list[AgentClient] = field(default_factory=list)
    start_seconds: float = START_SECONDS

    @property
    def socket(self) -> Path:
        return self.folder / "a.sock"

    @property
    def slab_path(self) -> Path:
        return Path("/dev/shm") / self.slab_name

    @property
    def log(self) -> str:
        path = self.folder / "agent.log"
        return path.read_text() if path.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "workers", "agent", "--node-id", "n1",
            "--socket", str(self.socket), "--slab-name", self.slab_name,
            "--slab-bytes", str(self.slab_bytes), "--block-tokens", str(BLOCK_TOKENS),
            "--check-when-idle", *self.extra,
        ]  # fmt: skip

    def spawn(self) -> None:
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log)

    def start(self) -> AgentProcess:
        self.spawn()
        self.connect(self.client("cli", "probe"))
        return self

    def hello(self, role: ClientRole, client_id: str, spec: NamespaceSpec | None = None) -> Hello:
        return make_hello(role, client_id, namespace=spec)

    def client(
        self, role: ClientRole = "worker", client_id: str = "p1", spec: NamespaceSpec | None = None
    ) -> AgentClient:
        """Calls get a generous bound: the machine may be busy."""
        client = AgentClient(
            f"unix:{self.socket}", self.hello(role, client_id, spec), timeout_seconds=20.0
        )
        self.clients.append(client)
        return client

    def connect(self, client: AgentClient) -> Welcome:
        """Connected within a bound, however long the agent takes to be up."""
        deadline = time.monotonic() + self.start_seconds
        while True:
            try:
                return client.connect()
            except AgentUnavailableError:
                if time.monotonic() > deadline:
                    raise AssertionError(f"no agent: {self.log}") from None
                time.sleep(0.05)

    def worker(self, client_id: str, spec: NamespaceSpec | None = None) -> AgentClient:
        """A connected worker's client."""
        client = self.client("worker", client_id, spec or make_spec())
        self.connect(client)
        return client

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and wait; the exit code."""
        assert self.process is not None
        self.process.send_signal(signum)
        return self.process.wait(timeout=START_SECONDS)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.kill(signal.SIGTERM)
        remove_slab(self.slab_path.name)


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[Callable[..., AgentProcess]]:
    """Makes agents that are not started yet."""
    made: list[AgentProcess] = []

    def make(*extra: str, slab_bytes: int = 1 << 20) -> AgentProcess:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(AgentProcess(folder, extra, slab_bytes))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def agent(make_agent: Callable[..., AgentProcess]) -> AgentProcess:
    """A running agent with a slab of 1 MiB: 51 slots of the tiny model's blocks."""
    return make_agent().start()


@pytest.fixture
def spec() -> NamespaceSpec:
    return make_spec()


@pytest.fixture
def spec_with() -> Callable[..., NamespaceSpec]:
    return make_spec


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Polls until it holds, with a generous bound."""

    def wait(holds: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.02)

    return wait


@pytest.fixture
def python_child(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Runs a script in another process; whatever still runs at the test's end is killed."""
    children: list[subprocess.Popen[bytes]] = []

    def run(script: str, *arguments: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE)
        children.append(child)
        return child

    yield run
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
