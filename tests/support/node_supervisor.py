"""One host's share of a cluster: a node agent and a worker, supervised as `perilune up` does it.

`perilune up` is one supervisor for one machine. Where each host is a namespace of its own, this
program stands in each: the real runners, reports and guardian, without control plane and gateway.
It ends, and ends what it runs, at SIGTERM or at the end of its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx2
import msgspec

from workers.core.supervision import Limits, ProcessState
from workers.models.resolve import resolve_model
from workers.supervisor.component import Component, WorkerIdentity
from workers.supervisor.cpus import split_cores
from workers.supervisor.engine_plan import WorkerPlace, emulated_worker, vllm_worker
from workers.supervisor.guard import Guard
from workers.supervisor.home import SHM
from workers.supervisor.reporter import report_workers
from workers.supervisor.runner import Runner
from workers.supervisor.settings import RoleSettings, Settings

AGENT_PORT = 7710
WORKER_PORT = 8101
MAX_MODEL_LEN = 2048
LEASE_SECONDS = 15.0
"""What a host that was cut off has pinned is free by then."""
DEVICE_BLOCKS = 128
"""Of 32 tokens: enough for one prompt and quickly made."""


@dataclass(frozen=True)
class HostShare:
    """What runs on the host with this address. `folder` holds token, secret, sockets and logs."""

    node_id: str
    worker_id: str
    role: Literal["prefill", "decode"]
    address: str
    control_plane: str
    folder: str
    slab: str
    slab_bytes: int
    model_folder: str
    engine: Literal["vllm", "emulated"]
    block_tokens: int
    dtype: str

    @property
    def socket(self) -> Path:
        return Path(self.folder) / "run" / f"{self.node_id}.sock"

    def log(self, component: str) -> Path:
        return Path(self.folder) / "logs" / f"{component}.log"


def agent_of(share: HostShare) -> Component:
    token, tcp = Path(share.folder) / "token", f"{share.address}:{AGENT_PORT}"
    return Component(
        name=f"agent-{share.node_id}",
        kind="agent",
        command=(
            sys.executable, "-m", "workers", "agent", "--node-id", share.node_id,
            "--socket", str(share.socket), "--tcp", tcp, "--secret-folder", share.folder,
            # Hosts share no memory; these namespaces do.
            "--transports", "tcp", "--slab-name", share.slab,
            "--slab-bytes", str(share.slab_bytes), "--block-tokens", str(share.block_tokens),
            "--lease-seconds", str(LEASE_SECONDS),
            "--control-plane", share.control_plane, "--token-file", str(token),
        ),
        environment={"PERILUNE_HOME": share.folder},
        probe=str(share.socket),
        url=f"unix:{share.socket}",
        log_file=share.log(f"agent-{share.node_id}"),
        stop_stage=1,
    )  # fmt: skip


def worker_of(share: HostShare) -> Component:
    small = RoleSettings(engine_args=("--num-gpu-blocks-override", str(DEVICE_BLOCKS)))
    settings = Settings(
        data=Path(share.folder), host=share.address, engine=share.engine, dtype=share.dtype,
        block_tokens=share.block_tokens, max_model_len=MAX_MODEL_LEN, dev_mode=True,
        prefill=small, decode=small,
    )  # fmt: skip
    model = resolve_model(share.model_folder, settings.data)
    cores = split_cores(sorted(os.sched_getaffinity(0)), 2)[0 if share.role == "prefill" else 1]
    place = WorkerPlace(
        share.worker_id, share.role, WORKER_PORT, cores, share.node_id, share.socket
    )
    build = vllm_worker if share.engine == "vllm" else emulated_worker
    command, environment = build(settings, model, place)
    if share.engine == "vllm":
        command = _patient(command)
    url = f"http://{share.address}:{WORKER_PORT}"
    return Component(
        name=f"worker-{share.worker_id}",
        kind="worker",
        command=command,
        environment={"PERILUNE_HOME": share.folder, **environment},
        probe=f"{url}/health",
        url=url,
        log_file=share.log(f"worker-{share.worker_id}"),
        limits=Limits(start_seconds=600.0, hang_seconds=120.0, grace_seconds=25.0),
        after=(f"agent-{share.node_id}",),
        worker=WorkerIdentity(
            share.worker_id, share.role, model.served_name, share.engine, share.socket
        ),
    )


def _patient(command: tuple[str, ...]) -> tuple[str, ...]:
    """On a busy machine, a slow answer of the agent must not look like a dead one."""
    words = list(command)
    index = words.index("--kv-transfer-config") + 1
    config = json.loads(words[index])
    config["kv_connector_extra_config"]["call_timeout_seconds"] = 1.0
    words[index] = json.dumps(config)
    return tuple(words)


async def supervise(share: HostShare) -> None:
    """Start the agent, then the worker; both are started anew whenever they end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(0, stop.set)
    slab = SHM / share.slab
    guard = Guard([str(slab), f"{slab}.journal"])
    await guard.start()
    try:
        async with httpx2.AsyncClient(trust_env=False) as http, asyncio.TaskGroup() as group:
            agent, worker = (
                Runner(component, http, lambda _: None, guard.note)
                for component in (agent_of(share), worker_of(share))
            )
            jobs = [group.create_task(job) for job in (
                agent.run(), worker.run(), report_workers([worker]), _in_order(agent, worker)
            )]  # fmt: skip
            await stop.wait()
            for runner in (worker, agent):
                runner.stop()
                await _until(runner, ProcessState.STOPPED)
            for job in jobs:
                job.cancel()
    finally:
        await guard.close()


async def _in_order(agent: Runner, worker: Runner) -> None:
    agent.start()
    await _until(agent, ProcessState.READY)
    worker.start()


async def _until(runner: Runner, state: ProcessState) -> None:
    while True:
        if runner.state is state:
            return
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(supervise(msgspec.json.decode(sys.argv[1], type=HostShare)))
