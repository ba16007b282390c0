"""From settings to the list of processes, with their ports, files and order."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workers.core.supervision import Limits
from workers.supervisor.component import Component, WorkerIdentity
from workers.supervisor.cpus import split_cores
from workers.supervisor.engine_plan import WorkerPlace, emulated_worker, vllm_worker
from workers.supervisor.home import SHM
from workers.supervisor.ports import Ports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.models.resolve import ResolvedModel
    from workers.supervisor.settings import Settings

NODE_ID = "n1"
GATEWAY_ID = "gw-1"
LAST_STAGE = 2
"""Stages of the end: gateway and workers, agent, control plane."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Everything that `up` starts, and how it is reached."""

    settings: Settings
    model: ResolvedModel
    model_path: str
    control_plane_url: str
    gateway_url: str
    slab_paths: tuple[Path, ...]
    components: tuple[Component, ...]

    @property
    def workers(self) -> list[Component]:
        return [component for component in self.components if component.worker is not None]


def make_plan(
    settings: Settings, model: ResolvedModel, model_path: str, ports: Ports
) -> ClusterPlan:
    """`model_path` holds the tokenizer for the gateway; engines load the model's `source`."""
    control_plane_url = f"http://{settings.host}:{ports.control_plane}"
    gateway_url = f"http://{settings.host}:{ports.gateway}"
    slab = SHM / f"perilune-{settings.cluster_name}-{NODE_ID}.slab"
    places = _places(settings, ports)
    components = (
        _control_plane(settings, ports, control_plane_url),
        _agent(settings, ports, control_plane_url, slab),
        _gateway(settings, ports, control_plane_url, gateway_url),
        *(_worker(settings, model, place) for place in places),
    )
    return ClusterPlan(
        settings=settings,
        model=model,
        model_path=model_path,
        control_plane_url=control_plane_url,
        gateway_url=gateway_url,
        slab_paths=(slab, slab.with_name(f"{slab.name}.journal")),
        components=components,
    )


def _control_plane(settings: Settings, ports: Ports, url: str) -> Component:
    home = settings.home
    return Component(
        name="control-plane",
        kind="controlplane",
        command=(
            sys.executable, "-m", "controlplane",
            "--host", settings.host, "--port", str(ports.control_plane),
            "--database-url", f"sqlite+aiosqlite:///{home.database}",
            "--token-file", str(home.token_file),
            "--cluster", settings.cluster_name,
        ),
        environment=_environment(settings),
        probe=f"{url}/health",
        url=url,
        log_file=home.log_file("control-plane"),
        stop_stage=LAST_STAGE,
    )  # fmt: skip


def _agent(settings: Settings, ports: Ports, control_plane_url: str, slab: Path) -> Component:
    home = settings.home
    socket = home.agent_socket(NODE_ID)
    return Component(
        name=f"agent-{NODE_ID}",
        kind="agent",
        command=(
            sys.executable, "-m", "workers", "agent",
            "--node-id", NODE_ID,
            "--socket", str(socket),
            "--tcp", f"{settings.host}:{ports.agent}",
            "--slab-name", slab.name,
            "--slab-bytes", str(int(settings.slab_gib * 1024**3)),
            "--block-tokens", str(settings.block_tokens),
            "--control-plane", control_plane_url,
            "--token-file", str(home.token_file),
            *_ssd_arguments(settings),
        ),
        environment=_environment(settings),
        probe=str(socket),
        url=f"unix:{socket}",
        log_file=home.log_file(f"agent-{NODE_ID}"),
        stop_stage=1,
    )  # fmt: skip


def _ssd_arguments(settings: Settings) -> tuple[str, ...]:
    if settings.ssd_path is None:
        return ()
    num_bytes = int((settings.ssd_gib or 0) * 1024**3)
    return ("--ssd-path", str(settings.ssd_path), "--ssd-bytes", str(num_bytes))


def _gateway(settings: Settings, ports: Ports, control_plane_url: str, url: str) -> Component:
    home = settings.home
    return Component(
        name="gateway",
        kind="gateway",
        command=(
            sys.executable, "-m", "controlplane.gateway",
            "--id", GATEWAY_ID,
            "--host", settings.host, "--port", str(ports.gateway),
            "--control-plane", control_plane_url,
            "--token-file", str(home.token_file),
            "--agent", f"unix:{home.agent_socket(NODE_ID)}",
        ),
        environment=_environment(settings),
        probe=f"{url}/livez",
        url=url,
        log_file=home.log_file("gateway"),
        after=("control-plane",),
    )  # fmt: skip


def _environment(settings: Settings) -> dict[str, str]:
    return {"PERILUNE_HOME": str(settings.data), "PYTHONUNBUFFERED": "1"}


def _places(settings: Settings, ports: Ports) -> list[WorkerPlace]:
    roles: list[tuple[str, Literal["prefill", "decode"]]] = [
        *((f"p{index + 1}", "prefill") for index in range(settings.prefill.count)),
        *((f"d{index + 1}", "decode") for index in range(settings.decode.count)),
    ]
    shares = split_cores(sorted(os.sched_getaffinity(0)), len(roles))
    gpus = [index % settings.num_gpus if settings.num_gpus else None for index in range(len(roles))]
    return [
        WorkerPlace(
            worker_id=worker_id,
            role=role,
            port=port,
            cores=cores,
            agent_socket=settings.home.agent_socket(NODE_ID),
            gpu=gpus[index],
            gpu_sharers=gpus.count(gpus[index]),
            starts_after=_previous_on(gpus, index, roles),
        )
        for index, ((worker_id, role), port, cores) in enumerate(
            zip(roles, ports.workers, shares, strict=True)
        )
    ]


def _previous_on(gpus: list[int | None], index: int, roles: Sequence[tuple[str, str]]) -> str:
    """The worker placed before on the same GPU; "" on CPU or where there is none."""
    before = [i for i in range(index) if gpus[i] is not None and gpus[i] == gpus[index]]
    return f"worker-{roles[before[-1]][0]}" if before else ""


def _worker(settings: Settings, model: ResolvedModel, place: WorkerPlace) -> Component:
    build = vllm_worker if settings.engine == "vllm" else emulated_worker
    command, environment = build(settings, model, place)
    url = f"http://{settings.host}:{place.port}"
    is_vllm = settings.engine == "vllm"
    return Component(
        name=f"worker-{place.worker_id}",
        kind="worker",
        command=command,
        environment={**_environment(settings), **environment},
        probe=f"{url}/health",
        url=url,
        log_file=settings.home.log_file(f"worker-{place.worker_id}"),
        limits=Limits(
            start_seconds=900.0 if is_vllm else 30.0,
            # A CPU engine may be busy for long with one prefill; its API process answers anyway.
            hang_seconds=120.0,
            grace_seconds=25.0 if is_vllm else 5.0,
        ),
        after=(f"agent-{NODE_ID}", *([place.starts_after] if place.starts_after else [])),
        loading_markers=("Starting to load model", "Initializing a V1 LLM engine"),
        worker=WorkerIdentity(
            worker_id=place.worker_id,
            role=place.role,
            model=model.served_name,
            engine=settings.engine,
            agent_socket=place.agent_socket,
        ),
    )
