"""Tells the node agent each second of the workers, and carries out what it is told of them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workers.client import AsyncAgentClient
from workers.core.errors import PeriluneError
from workers.core.hashing import hash_test_vector
from workers.core.messages import Hello, WorkerCommand
from workers.core.stats_messages import WorkerStatus
from workers.core.supervision import ProcessState
from workers.supervisor.procfs import session_memory_bytes

if TYPE_CHECKING:
    from workers.supervisor.runner import Runner

REPORT_SECONDS = 1.0
KEPT_COMMAND_IDS = 1000
ReportedState = Literal["launching", "loading", "ready", "draining", "stopped", "failed"]
REPORTED: dict[ProcessState, ReportedState] = {
    ProcessState.WAITING: "launching",
    ProcessState.LAUNCHING: "launching",
    ProcessState.LOADING: "loading",
    ProcessState.READY: "ready",
    ProcessState.DRAINING: "draining",
    ProcessState.STOPPING: "draining",
    ProcessState.STOPPED: "stopped",
    ProcessState.FAILED: "failed",
}
log = logging.getLogger(__name__)


async def report_workers(runners: Sequence[Runner]) -> None:
    """Run until cancelled. Each node's agent hears of the workers on its node."""
    by_agent: dict[Path, list[Runner]] = {}
    for runner in runners:
        if runner.component.worker is not None:
            by_agent.setdefault(runner.component.worker.agent_socket, []).append(runner)
    async with asyncio.TaskGroup() as group:
        for socket, theirs in by_agent.items():
            group.create_task(_report_to(socket, theirs))


async def _report_to(socket: Path, runners: Sequence[Runner]) -> None:
    """An agent that is away is asked again: it may be restarting."""
    hello = Hello(
        role="supervisor",
        client_id="supervisor",
        hash_vector=hash_test_vector(),
        pid=os.getpid(),
    )
    client = AsyncAgentClient(f"unix:{socket}", hello)
    done: deque[str] = deque(maxlen=KEPT_COMMAND_IDS)
    try:
        while True:
            try:
                obey(await client.report_workers(statuses(runners)), runners, done)
            except PeriluneError as error:
                log.debug("agent: %s", error)
            await asyncio.sleep(REPORT_SECONDS)
    finally:
        await client.close()


def statuses(runners: Sequence[Runner]) -> list[WorkerStatus]:
    """The whole list, as the agent passes it on."""
    return [_status(runner) for runner in runners]


def obey(commands: list[WorkerCommand], runners: Sequence[Runner], done: deque[str]) -> None:
    """Carry out each command once: the same one may come again until it is acknowledged."""
    by_worker = {
        runner.component.worker.worker_id: runner for runner in runners if runner.component.worker
    }
    for command in commands:
        if command.command_id in done:
            continue
        done.append(command.command_id)
        runner = by_worker.get(command.worker_id)
        if runner is None:
            log.warning("no worker %s for %s", command.worker_id, command.action)
            continue
        runner.act(command.action)


def _status(runner: Runner) -> WorkerStatus:
    worker = runner.component.worker
    assert worker is not None
    return WorkerStatus(
        worker_id=worker.worker_id,
        role=worker.role,
        model=worker.model,
        url=runner.component.url,
        state=REPORTED[runner.state],
        pid=runner.pid,
        restarts=runner.process.restarts,
        engine=worker.engine,
        started_at=runner.started_at,
        last_error=runner.process.last_error,
        log_file=str(runner.component.log_file),
        rss_bytes=(session_memory_bytes(runner.pid) or 0) if runner.pid else 0,
    )
