"""The parent of every process of this machine's cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx2

from workers.core.errors import PeriluneError
from workers.core.supervision import ProcessState
from workers.data_dir import default_data_dir
from workers.supervisor.guard import Guard
from workers.supervisor.plan import LAST_STAGE, ClusterPlan
from workers.supervisor.procfs import identify
from workers.supervisor.progress import Line, Progress
from workers.supervisor.registration import register_cluster, wait_until_routable
from workers.supervisor.reporter import report_workers
from workers.supervisor.runner import Runner
from workers.supervisor.state_file import ClusterState, SupervisorState, write_state

START_ATTEMPTS = 2
"""So many failures of one process before it was ever ready end `up`."""
CHECK_SECONDS = 1.0
SAME_REQUEST_SECONDS = 1.0
"""A terminal and `make` both pass one Ctrl-C on: within this time it is the same one."""
USUAL_URL = "http://127.0.0.1:7700"
log = logging.getLogger(__name__)


class StartupError(PeriluneError):
    """The cluster did not come up; the text names the process, the cause and its log."""


class Supervisor:
    """Runs a plan until `request_stop`, which a signal handler may call."""

    def __init__(self, plan: ClusterPlan, token: str, progress: Progress) -> None:
        self.state: ClusterState = "starting"
        self._plan = plan
        self._stopping = False
        self._asked_at = 0.0
        self._transition = asyncio.Event()
        self._token = token
        self._progress = progress
        self._started_at = time.time()  # noqa: TID251 - shown to people
        self._began = time.monotonic()
        self._runners: dict[str, Runner] = {}
        self._ever_ready: set[str] = set()
        self._shown: dict[str, ProcessState] = {}
        self._guard = Guard([str(path) for path in plan.slab_paths])
        self._failure: StartupError | None = None

    async def run(self) -> None:
        """Start everything, stay until `stop`, end everything. Raises StartupError."""
        await self._guard.start()
        limits = httpx2.Limits(max_connections=32)
        try:
            async with (
                httpx2.AsyncClient(trust_env=False, limits=limits) as http,
                asyncio.TaskGroup() as group,
            ):
                tasks = self._launch(http, group)
                await self._until_ready(http)
                await self._until(self._is_over)
                await self._end()
                for task in tasks:
                    task.cancel()
        finally:
            await self._guard.close()
        if self._failure is not None:
            raise self._failure

    def request_stop(self) -> None:
        """End everything in order; `run` returns when it is done. Asked twice, it hurries."""
        now = time.monotonic()
        if self._stopping and now - self._asked_at > SAME_REQUEST_SECONDS:
            for runner in self._runners.values():
                runner.kill()
        elif not self._stopping:
            self._asked_at = now
        self._stopping = True
        self._transition.set()

    @property
    def snapshot_path(self) -> Path:
        """`supervisor.json`, written at each change."""
        return self._plan.settings.home.state_file

    def snapshot(self) -> SupervisorState:
        """What `supervisor.json` says."""
        identity = identify(os.getpid())
        return SupervisorState(
            pid=os.getpid(),
            start_ticks=identity.start_ticks if identity else 0,
            cluster=self._plan.settings.cluster_name,
            state=self.state,
            started_at=self._started_at,
            control_plane_url=self._plan.control_plane_url,
            gateway_url=self._plan.gateway_url,
            model=self._plan.model.served_name,
            engine=self._plan.settings.engine,
            slab_paths=[str(path) for path in self._plan.slab_paths],
            components=[runner.snapshot() for runner in self._runners.values()],
        )

    def _launch(
        self, http: httpx2.AsyncClient, group: asyncio.TaskGroup
    ) -> list[asyncio.Task[None]]:
        for component in self._plan.components:
            runner = Runner(component, http, self._changed, self._guard.note)
            self._runners[component.name] = runner
            self._progress.update(Line(component.name, runner.state.value))
        self._save()
        tasks = [
            group.create_task(runner.run(), name=f"run {name}")
            for name, runner in self._runners.items()
        ]
        workers = [runner for runner in self._runners.values() if runner.component.worker]
        tasks.append(group.create_task(report_workers(workers), name="report workers"))
        tasks.append(group.create_task(self._keep_order(), name="start in order"))
        tasks.append(group.create_task(self._keep_registered(http), name="register"))
        return tasks

    async def _keep_order(self) -> None:
        """Start each process once what it needs is ready."""
        while True:
            for runner in self._runners.values():
                needs = runner.component.after
                if runner.state is ProcessState.WAITING and self._all_ready(needs):
                    runner.start()
            await self._next_transition()

    async def _keep_registered(self, http: httpx2.AsyncClient) -> None:
        """Tell each new control plane of the model; an old database knows it already: no harm."""
        told = -1
        runner = self._runners["control-plane"]
        while True:
            is_new = runner.state is ProcessState.READY and told != runner.process.restarts
            if is_new and await register_cluster(self._plan, self._token, http):
                told = runner.process.restarts
            await asyncio.sleep(CHECK_SECONDS)

    async def _until_ready(self, http: httpx2.AsyncClient) -> None:
        names = tuple(self._runners)
        await self._until(lambda: self._is_over() or self._all_ready(names))
        if self._is_over():
            return
        if missing := await wait_until_routable(self._plan, self._token, http):
            logs = self._plan.settings.home.logs
            self._failure = StartupError(
                f"all processes run, but requests cannot be served: {missing} (logs: {logs})"
            )
            return
        self._progress.say(f"ready in {time.monotonic() - self._began:.1f} s")
        for line in next_steps(self._plan):
            self._progress.say(line)
        self.state = "ready"
        self._save()

    async def _end(self) -> None:
        self.state = "stopping"
        self._save()
        for stage in range(LAST_STAGE + 1):
            runners = [
                runner for runner in self._runners.values() if runner.component.stop_stage == stage
            ]
            for runner in runners:
                runner.stop()
            await self._until(partial(_all_stopped, runners))
        for slab in self._plan.slab_paths:
            slab.unlink(missing_ok=True)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._next_transition()

    async def _next_transition(self) -> None:
        """Wait until some process changes its state, or the end is asked for."""
        self._transition = asyncio.Event() if self._transition.is_set() else self._transition
        await self._transition.wait()

    def _is_over(self) -> bool:
        return self._stopping or self._failure is not None

    def _all_ready(self, names: tuple[str, ...]) -> bool:
        return all(self._runners[name].state is ProcessState.READY for name in names)

    def _changed(self, runner: Runner) -> None:
        name, process = runner.component.name, runner.process
        if process.state is ProcessState.READY:
            self._ever_ready.add(name)
        self._save()
        if self._shown.get(name) is not process.state:  # a new pid is no news to an operator
            self._shown[name] = process.state
            self._progress.update(
                Line(name, process.state.value, runner.seconds_to_ready, self._why(runner))
            )
        may_fail = self.state == "starting" and name not in self._ever_ready
        if process.state is ProcessState.FAILED and may_fail and process.failures >= START_ATTEMPTS:
            self._failure = StartupError(f"{name} failed because {self._why(runner)}")
        self._transition.set()

    def _why(self, runner: Runner) -> str:
        if runner.state is not ProcessState.FAILED:
            return ""
        return f"{runner.process.last_error} (log: {runner.component.log_file})"

    def _save(self) -> None:
        try:
            write_state(self.snapshot_path, self.snapshot())
        except OSError as error:  # a full disk must not end what runs
            log.warning("cannot write %s: %s", self.snapshot_path, error)


def next_steps(plan: ClusterPlan) -> list[str]:
    """A request that answers, the console, the dashboard."""
    message = '{"role": "user", "content": "What is the capital of France?"}'
    body = f'{{"model": "{plan.model.served_name}", "temperature": 0, "messages": [{message}]}}'
    return [
        f"  curl {plan.gateway_url}/v1/chat/completions "
        f"-H 'content-type: application/json' -d '{body}'",
        f"  {_console(plan)}",
        f"  {plan.control_plane_url}/",
    ]


def _console(plan: ClusterPlan) -> str:
    """The command as this cluster's operator has to type it."""
    data, url = plan.settings.data, plan.control_plane_url
    home = "" if data == default_data_dir() else f"PERILUNE_HOME={shlex.quote(str(data))} "
    where = "" if url == USUAL_URL else f" --url {url}"
    return f"{home}perilune console{where}"


def _all_stopped(runners: list[Runner]) -> bool:
    return all(runner.state is ProcessState.STOPPED for runner in runners)
