"""A running cluster as tests ask it: over its own HTTP and command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import psutil

from workers.bench.acceptance import Target
from workers.supervisor.home import Home
from workers.supervisor.state_file import ComponentState, SupervisorState, read_state

T = TypeVar("T")
DTYPE = "float32"
BLOCK_TOKENS = 64


@dataclass(frozen=True)
class LiveCluster:
    """The running cluster and how to ask it."""

    home: Home
    model_folder: Path
    client: httpx2.Client
    target: Target

    @property
    def gateway(self) -> str:
        return self.target.gateway_url

    @property
    def api(self) -> str:
        return f"{self.target.control_plane_url}/api/v1"

    @property
    def model(self) -> str:
        return self.target.model

    @property
    def token(self) -> str:
        return self.home.token_file.read_text().strip()

    def state(self) -> SupervisorState:
        state = read_state(self.home.state_file)
        assert state is not None
        return state

    def component(self, name: str) -> ComponentState:
        return next(c for c in self.state().components if c.name == name)

    def get(self, path: str, **params: str | int) -> Any:
        reply = self.client.get(f"{self.api}{path}", params=params)
        reply.raise_for_status()
        return reply.json()

    def items(self, path: str, **params: str | int) -> list[dict[str, Any]]:
        payload = self.get(path, **params)
        rows: list[dict[str, Any]] = payload["items"] if isinstance(payload, dict) else payload
        return rows

    def complete(self, prompt: object, max_tokens: int = 16, **more: object) -> httpx2.Response:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return self.client.post(f"{self.gateway}/v1/completions", json={**body, **more})

    def chat(self, text: str, max_tokens: int = 32, **more: object) -> httpx2.Response:
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens, "temperature": 0,
        }  # fmt: skip
        return self.client.post(f"{self.gateway}/v1/chat/completions", json={**body, **more})

    def decision(self, request_id: str, *, with_decode_leg: bool = True) -> dict[str, Any]:
        """The finished record of a request."""

        def read() -> dict[str, Any] | None:
            reply = self.client.get(f"{self.api}/decisions/{request_id}")
            if reply.status_code != 200:
                return None
            record: dict[str, Any] = reply.json()
            done = record["status"] != "running"
            return record if done and (record["decode_leg"] or not with_decode_leg) else None

        return wait_for(read, 15, f"a finished decision record of {request_id}")

    def pinned_blocks(self) -> int:
        return sum(int(node["pinned_blocks"] or 0) for node in self.items("/nodes"))

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "console", *arguments],
            capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, "PERILUNE_HOME": str(self.home.data)},
        )  # fmt: skip

    def slo(self, **fields: float | str) -> None:
        """Set fields of the default SLO policy by the command line."""
        words = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
        put = self.cli("policy", "put", "slo/default", *words, "--reason", "test")
        assert put.returncode == 0, put.stderr

    def status(self) -> dict[str, Any]:
        done = self.cli("status", "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def wait_ready(self, name: str, other_than_pid: int, seconds: float = 150) -> ComponentState:
        """Wait until a component is ready again as another process."""

        def read() -> ComponentState | None:
            component = self.component(name)
            changed = component.pid not in (0, other_than_pid)
            return component if changed and component.state == "ready" else None

        return wait_for(read, seconds, f"{name} to be ready again")

    def wait_routed(self, name: str, seconds: float = 30) -> None:
        """Wait until the control plane shows a worker ready, so that gateways route to it."""
        wait_for(
            lambda: any(
                row["id"] == name and row["state"] == "ready" for row in self.items("/workers")
            ),
            seconds,
            f"worker {name} ready in the control plane",
        )


def wait_for(read: Callable[[], T | None], seconds: float, what: str) -> T:
    """Poll `read` until it gives something true; the last error is shown when it never does."""
    deadline = time.monotonic() + seconds
    error: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if value := read():
                return value
        except (httpx2.HTTPError, AssertionError, StopIteration) as caught:
            error = caught
        time.sleep(0.2)
    raise AssertionError(f"waited {seconds:.0f} s for {what}; last error: {error!r}")


def engine_processes(pid: int) -> list[psutil.Process]:
    """An engine's API server and every process below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]
