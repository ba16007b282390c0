"""A cluster and a plain engine of this run's own: started for it, ended with it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2

from workers.core.errors import PeriluneError
from workers.engines.vllm import VllmWorkerSpec
from workers.supervisor.cpus import as_list, split_cores
from workers.supervisor.engine_plan import DEFAULT_BATCHED_TOKENS
from workers.supervisor.home import Home
from workers.supervisor.session_end import end_sessions
from workers.supervisor.state_file import SupervisorState, read_state

_UP_SECONDS = 420
_DOWN_SECONDS = 90
_ENGINE_END_SECONDS = 30
_LEFTOVER_SECONDS = 5.0


class BenchClusterError(PeriluneError):
    """The cluster or engine that a run needs did not come up; the text has its last words."""


@dataclass(frozen=True, slots=True)
class PlainEngine:
    """An engine without a pool."""

    url: str
    pid: int


@contextmanager
def own_cluster(
    data: Path, model_folder: Path, dtype: str, block_tokens: int, *more: str
) -> Iterator[SupervisorState]:
    """`perilune up --detach` on free ports in `data`; ended with `perilune down`.

    `more` are further options of `perilune up`.

    Raises BenchClusterError with the command's own words when it does not come up.
    """
    command = [
        "up", "--detach", "--data", str(data), "--model", str(model_folder), "--dtype", dtype,
        "--block-tokens", str(block_tokens), "--dev-mode", "--port-control-plane", "0",
        "--port-gateway", "0", "--port-agent", "0", "--port-workers", "0",
        *more,
    ]  # fmt: skip
    try:
        done = _perilune(command, _UP_SECONDS)
        state = read_state(Home(data).state_file)
        if done.returncode != 0 or state is None:
            raise BenchClusterError(f"perilune up failed: {(done.stderr or done.stdout)[-2000:]}")
        yield state
    finally:
        _perilune(["down", "--data", str(data)], _DOWN_SECONDS)


def _perilune(arguments: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "console", *arguments],
        capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@contextmanager
def plain_engine(
    model_folder: Path, served_name: str, dtype: str, log_file: Path, kv_cache_gib: int = 1,
    ready_seconds: float = 240,
) -> Iterator[PlainEngine]:  # fmt: skip
    """vLLM without a connector, bound to as many cores as one worker of the cluster."""
    cores = split_cores(sorted(os.sched_getaffinity(0)), 2)[-1]
    spec = VllmWorkerSpec(
        worker_id="plain", role="plain", model=str(model_folder), served_name=served_name,
        port=_free_port(), engine_python=sys.executable, dtype=dtype, max_model_len=8192,
        max_num_batched_tokens=DEFAULT_BATCHED_TOKENS, kv_cache_gib=kv_cache_gib,
        cpu_binding=as_list(cores), dev_mode=True,
    )  # fmt: skip
    wrapper = [sys.executable, "-m", "workers.supervisor.child", str(os.getpid())]
    environment = {**os.environ, **spec.environment()}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*wrapper, *spec.command()], env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        url = f"http://127.0.0.1:{spec.port}"
        try:
            _wait_ready(process, url, log_file, ready_seconds)
            yield PlainEngine(url, process.pid)
        finally:
            _end(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log_file: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx2.get(f"{url}/v1/models", timeout=2).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.5)
    last = log_file.read_text(errors="replace").strip().splitlines()[-3:]
    raise BenchClusterError(f"the plain engine did not answer at {url}: {' / '.join(last)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The engine ends its own processes in order; what is left of its session after that follows."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_ENGINE_END_SECONDS)
    end_sessions({process.pid}, _LEFTOVER_SECONDS)
    process.wait(timeout=10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_json(result: dict[str, object]) -> None:
    """One object on stdout, for machines."""
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
