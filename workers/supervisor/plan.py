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
from workers.transfer_tls import tls_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.models.resolve import ResolvedModel
    from workers.supervisor.settings import Settings

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
    control_plane_url = f"http://{settings.reach}:{ports.control_plane}"
    gateway_url = f"http://{settings.reach}:{ports.gateway}"
    nodes = node_ids(settings)
    slabs = [SHM / f"perilune-{settings.cluster_name}-{node_id}.slab" for node_id in nodes]
    places = _places(settings, ports)
    components = (
        _control_plane(settings, ports, control_plane_url),
        *(
            _agent(settings, node_id, port, control_plane_url, slab)
            for node_id, port, slab in zip(nodes, ports.agents, slabs, strict=True)
        ),
        _gateway(settings, ports, control_plane_url, gateway_url),
        *(_worker(settings, model, place) for place in places),
    )
    return ClusterPlan(
        settings=settings,
        model=model,
        model_path=model_path,
        control_plane_url=control_plane_url,
        gateway_url=gateway_url,
        slab_paths=tuple(
            path for slab in slabs for path in (slab, slab.with_name(f"{slab.name}.journal"))
        ),
        components=components,
    )


def node_ids(settings: Settings) -> list[str]:
    """n1, n2, ...: one agent each."""
    return [f"n{number}" for number in range(1, settings.nodes + 1)]


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
            *_directory_arguments(settings),
        ),
        environment=_environment(settings),
        probe=f"{url}/health",
        url=url,
        log_file=home.log_file("control-plane"),
        stop_stage=LAST_STAGE,
    )  # fmt: skip


def _agent(
    settings: Settings, node_id: str, port: int, control_plane_url: str, slab: Path
) -> Component:
    home = settings.home
    socket = home.agent_socket(node_id)
    return Component(
        name=f"agent-{node_id}",
        kind="agent",
        command=(
            sys.executable, "-m", "workers", "agent",
            "--node-id", node_id,
            "--socket", str(socket),
            "--tcp", f"{settings.host}:{port}",
            "--secret-folder", str(settings.data),
            "--transports", settings.transfer_engine,
            "--slab-name", slab.name,
            "--slab-bytes", str(int(settings.slab_gib * 1024**3)),
            "--block-tokens", str(settings.block_tokens),
            "--control-plane", control_plane_url,
            "--token-file", str(home.token_file),
            *_ssd_arguments(settings),
            *_directory_arguments(settings, "--cluster", settings.cluster_name),
        ),
        environment=_environment(settings),
        probe=str(socket),
        url=f"unix:{socket}",
        log_file=home.log_file(f"agent-{node_id}"),
        stop_stage=1,
    )  # fmt: skip


def _directory_arguments(settings: Settings, *more: str) -> tuple[str, ...]:
    return ("--directory", settings.directory, *more) if settings.directory else ()


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
            *(
                word
                for node_id in node_ids(settings)
                for word in ("--agent", f"unix:{home.agent_socket(node_id)}")
            ),
        ),
        environment=_environment(settings),
        probe=f"{url}/livez",
        url=url,
        log_file=home.log_file("gateway"),
        after=("control-plane",),
    )  # fmt: skip


def _environment(settings: Settings) -> dict[str, str]:
    tls = settings.transfer_tls
    return {
        "PERILUNE_HOME": str(settings.data),
        "PYTHONUNBUFFERED": "1",
        **({} if tls is None else tls_environment(tls)),
    }


def _places(settings: Settings, ports: Ports) -> list[WorkerPlace]:
    roles: list[tuple[str, Literal["prefill", "decode"]]] = [
        *((f"p{index + 1}", "prefill") for index in range(settings.prefill.count)),
        *((f"d{index + 1}", "decode") for index in range(settings.decode.count)),
    ]
    shares = split_cores(sorted(os.sched_getaffinity(0)), len(roles))
    nodes = _nodes_of(settings)
    gpus = gpus_of(settings.prefill.count, settings.decode.count, settings.num_gpus)
    return [
        WorkerPlace(
            worker_id=worker_id,
            role=role,
            port=port,
            cores=cores,
            node_id=nodes[index],
            agent_socket=settings.home.agent_socket(nodes[index]),
            gpu=gpus[index],
            gpu_sharers=gpus.count(gpus[index]),
            starts_after=_previous_on(gpus, index, roles),
        )
        for index, ((worker_id, role), port, cores) in enumerate(
            zip(roles, ports.workers, shares, strict=True)
        )
    ]


def _nodes_of(settings: Settings) -> list[str]:
    """Each worker's node: prefill from the first on, decode from the last on, so that with several
    nodes bytes move between them."""
    nodes = node_ids(settings)
    prefill = [nodes[index % len(nodes)] for index in range(settings.prefill.count)]
    decode = [nodes[-1 - index % len(nodes)] for index in range(settings.decode.count)]
    return [*prefill, *decode]


def gpus_of(num_prefill: int, num_decode: int, num_gpus: int) -> list[int | None]:
    """Of the prefill workers, then of the decode workers. From two GPUs on, none serves both roles:
    decode stands still for as long as another process' prefill has its GPU."""
    total = num_prefill + num_decode
    if num_gpus < 2 or num_gpus >= total:
        return [index % num_gpus if num_gpus else None for index in range(total)]
    for_prefill = min(max(1, round(num_gpus * num_prefill / total)), num_gpus - 1)
    for_decode = num_gpus - for_prefill
    return [
        *(index % for_prefill for index in range(num_prefill)),
        *(for_prefill + index % for_decode for index in range(num_decode)),
    ]


def _previous_on(gpus: list[int | None], index: int, roles: Sequence[tuple[str, str]]) -> str:
    """The worker placed before on the same GPU; "" on CPU or where there is none."""
    before = [i for i in range(index) if gpus[i] is not None and gpus[i] == gpus[index]]
    return f"worker-{roles[before[-1]][0]}" if before else ""


def _worker(settings: Settings, model: ResolvedModel, place: WorkerPlace) -> Component:
    build = vllm_worker if settings.engine == "vllm" else emulated_worker
    command, environment = build(settings, model, place)
    url = f"http://{settings.reach}:{place.port}"
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
        after=(f"agent-{place.node_id}", *([place.starts_after] if place.starts_after else [])),
        loading_markers=("Starting to load model", "Initializing a V1 LLM engine"),
        worker=WorkerIdentity(
            worker_id=place.worker_id,
            role=place.role,
            model=model.served_name,
            engine=settings.engine,
            agent_socket=place.agent_socket,
        ),
    )
