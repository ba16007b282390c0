"""Processes of one run of the placement bench: agents, emulated workers, a gateway or a peer.

Fresh for each run, so that each begins with empty pools. All end with it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2

from controlplane.bench.placement_trace import MAX_TOKENS, TOKEN_SCALE, WORDS_A_BLOCK
from controlplane.bench.processes import ROOT, free_port, running, wait_port
from workers.core.errors import PeriluneError

PEER_PROGRAM: Final = ROOT / ".venv-peers" / "bin" / "vllm-router"
MODEL: Final = "bench"
START_SECONDS: Final = 60.0
SLOT_BYTES: Final = 2048
"""Of an emulated block with its header, rounded up."""
WINDOW_TOKENS: Final = 8192 // TOKEN_SCALE
"""The gateway's default window of a prefill worker, in tokens on the wire."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the cluster. `node_blocks`: a node's pool, in blocks of the trace."""

    prefill_workers: int = 6
    decode_workers: int = 2
    node_blocks: int = 3000
    cost_model: str = "h200-8b"
    time_factor: float = 1.0

    @property
    def names(self) -> list[tuple[str, str]]:
        prefill = [(f"p{i}", "prefill") for i in range(1, self.prefill_workers + 1)]
        return prefill + [(f"d{i}", "decode") for i in range(1, self.decode_workers + 1)]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers that answer, and their agents' addresses, both by worker."""

    urls: dict[str, str]
    agents: dict[str, str]

    def state(self, worker: str) -> dict[str, Any]:
        """The worker's counters."""
        reply: dict[str, Any] = httpx2.get(f"{self.urls[worker]}/debug/state", timeout=10).json()
        return reply


@contextmanager
def fleet(shape: Shape, folder: Path, model_folder: Path) -> Iterator[Fleet]:
    """A node for each worker, with an agent of its own."""
    with ExitStack() as stack:
        agents = {
            name: stack.enter_context(_agent(name, shape.node_blocks, folder))
            for name, _ in shape.names
        }
        for address in agents.values():
            _wait_socket(Path(address.removeprefix("unix:")))
        command = [
            sys.executable, "-m", "workers.engines.emulated", "--model", MODEL,
            "--model-path", str(model_folder), "--block-tokens", str(WORDS_A_BLOCK),
            "--max-model-len", str(2 * MAX_TOKENS // TOKEN_SCALE), "--device-blocks", "0",
            "--cost-model", shape.cost_model, "--token-scale", str(TOKEN_SCALE),
            "--time-factor", str(shape.time_factor),
        ]  # fmt: skip
        for name, role in shape.names:
            command += ["--worker", f"{name}:{role}:0", "--agent", f"{name}={agents[name]}"]
        process = stack.enter_context(_process(command, folder, "fleet", stdout=subprocess.PIPE))
        ready = json.loads(_first_line(process, folder / "fleet.log"))
        yield Fleet(ready["workers"], agents)


@contextmanager
def gateway(
    shape: Shape, workers: Fleet, placement: str, folder: Path, model_folder: Path, number: int = 1
) -> Iterator[str]:
    """Ours, with that placement. Yields its URL. `number`: of several."""
    spec = {"placement": placement, "max_concurrent_per_decode": 4096}
    waits = {"max_waiting_s": 3600, "max_prefilling_s": 3600, "max_silence_s": 3600}
    admission = {"window_tokens": WINDOW_TOKENS, "max_waiting": 100_000, "max_wait_s": 600}
    view = {
        "boot_id": "bench",
        "nodes": [{"id": name, "events_endpoint": workers.agents[name]} for name, _ in shape.names],
        "workers": [
            {"id": name, "node_id": name, "role": role, "model": MODEL, "state": "ready",
             "engine": "emulated", "url": workers.urls[name], "max_concurrent_requests": 4096}
            for name, role in shape.names
        ],
        "models": [{"id": MODEL, "path": str(model_folder)}],
        "policies": [
            {"kind": kind, "scope": "default", "revision": 1, "spec": content}
            for kind, content in (("scheduling", spec | waits), ("admission", admission),
                                  ("slo", {"mode": "off"}))
        ],
    }  # fmt: skip
    path = folder / "view.json"
    path.write_text(json.dumps(view))
    port = free_port()
    command = [sys.executable, "-m", "controlplane.gateway", "--port", str(port),
               "--static", str(path), "--log-level", "warning"]  # fmt: skip
    command += ["--id", f"gw-{number}"]
    with _process(command, folder, f"gateway-{number}") as process:
        wait_port(port, process, START_SECONDS)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def router(shape: Shape, workers: Fleet, policy: str, folder: Path) -> Iterator[str]:
    """vllm-router in its P/D mode with that policy for both legs, its other settings as they are."""
    port = free_port()
    command = [str(PEER_PROGRAM), "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
               "--vllm-pd-disaggregation", "--log-level", "warning",
               "--request-timeout-secs", "3600", "--max-concurrent-requests", "100000",
               "--prometheus-port", str(free_port())]  # fmt: skip
    for name, role in shape.names:
        command += [f"--{role}", workers.urls[name]]
    with _process(command, folder, f"router-{policy}") as process:
        wait_port(port, process, START_SECONDS)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _agent(name: str, node_blocks: int, folder: Path) -> Iterator[str]:
    path = folder / f"{name}.sock"
    slab = f"perilune-bench-{os.getpid()}-{name}.slab"
    command = [
        sys.executable, "-m", "workers", "agent", "--node-id", name, "--socket", str(path),
        "--tcp", f"127.0.0.1:{free_port()}", "--slab-name", slab,
        "--slab-bytes", str(node_blocks * SLOT_BYTES), "--block-tokens", str(WORDS_A_BLOCK),
        "--secret-folder", str(folder),
    ]  # fmt: skip
    try:
        with _process(command, folder, f"agent-{name}"):
            yield f"unix:{path}"
    finally:
        for left in Path("/dev/shm").glob(f"{slab}*"):
            left.unlink(missing_ok=True)


@contextmanager
def _process(
    command: list[str], folder: Path, name: str, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{name}.log").open("wb") as log:
        out = log if stdout is None else stdout
        with running(command, stdout=out, stderr=log) as process:
            yield process


def _first_line(process: subprocess.Popen[bytes], log: Path) -> bytes:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], START_SECONDS)
    line = process.stdout.readline() if readable else b""
    if not line:
        last = log.read_text(errors="replace")[-500:]
        raise PeriluneError(f"the emulated workers did not start: {last}")
    return line


def _wait_socket(path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise PeriluneError(f"no agent listens at {path} within {START_SECONDS:g} s")
        time.sleep(0.05)
