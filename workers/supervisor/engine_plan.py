"""Command line and environment of one worker, by engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workers.engines.vllm import VllmWorkerSpec
from workers.supervisor.cpus import as_list

if TYPE_CHECKING:
    from workers.models.resolve import ResolvedModel
    from workers.supervisor.settings import RoleSettings, Settings

DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_GPU_SHARE = {"prefill": 0.9, "decode": 0.85}
Launch = tuple[tuple[str, ...], dict[str, str]]


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where one worker runs: its port, cores and node agent."""

    worker_id: str
    role: Literal["prefill", "decode"]
    port: int
    cores: list[int]
    node_id: str
    agent_socket: Path
    gpu: int | None = None
    gpu_sharers: int = 1  # workers on that GPU, this one included
    starts_after: str = ""  # the worker before it on that GPU: an engine measures free memory


def emulated_worker(settings: Settings, model: ResolvedModel, place: WorkerPlace) -> Launch:
    """A cost model behind the OpenAI API; its pool client is the real one."""
    command = [
        sys.executable, "-m", "workers.engines.emulated",
        "--worker", f"{place.worker_id}:{place.role}:{place.port}",
        "--host", settings.host,
        "--model", model.served_name,
        "--block-tokens", str(settings.block_tokens),
        "--max-model-len", str(settings.max_model_len),
        "--agent-socket", str(place.agent_socket),
        "--weights-version", model.weights_version,
    ]  # fmt: skip
    if model.is_local:
        command += ["--model-path", model.source]
    return tuple(command), {}


def vllm_worker(settings: Settings, model: ResolvedModel, place: WorkerPlace) -> Launch:
    """vLLM's API server with our connector."""
    role = settings.prefill if place.role == "prefill" else settings.decode
    share = role.gpu_memory_utilization
    spec = VllmWorkerSpec(
        worker_id=place.worker_id,
        role=place.role,
        model=model.source,
        served_name=model.served_name,
        port=place.port,
        engine_python=settings.engine_python,
        host=settings.host,
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=role.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
        kv_cache_gib=settings.kv_cache_gib,
        gpu_memory_utilization=_gpu_share(place) if share is None else share,
        cpu_binding=as_list(place.cores),
        agent_socket=str(place.agent_socket),
        block_tokens=settings.block_tokens,
        engine_block_tokens=role.block_size or 0,
        model_id=model.model_id,
        weights_version=model.weights_version,
        dev_mode=settings.dev_mode,
        extra_args=_engine_arguments(role),
    )
    environment = spec.environment()
    if place.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(place.gpu)
    return tuple(spec.command()), environment


def _gpu_share(place: WorkerPlace) -> float:
    """The role's usual share of a GPU's memory, divided among those who share the GPU."""
    return round(DEFAULT_GPU_SHARE[place.role] / place.gpu_sharers, 3)


def _engine_arguments(role: RoleSettings) -> tuple[str, ...]:
    arguments: list[str] = []
    if not role.enable_prefix_caching:
        arguments.append("--no-enable-prefix-caching")
    if role.kv_cache_dtype is not None:
        arguments += ["--kv-cache-dtype", role.kv_cache_dtype]
    return (*arguments, *role.engine_args)
