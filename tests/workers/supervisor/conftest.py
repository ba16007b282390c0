"""Small real processes to supervise."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from workers.core.supervision import Limits, ProcessState
from workers.supervisor.component import Component
from workers.supervisor.runner import Runner

WAIT_SECONDS = 30.0
SERVICE = """
import os, signal, socket, subprocess, sys, time
path, *words = sys.argv[1:]
if "crash" in words:
    print("ValueError: boom", file=sys.stderr, flush=True)
    sys.exit(3)
if "grandchild" in words:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("grandchild", child.pid, flush=True)
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.path.exists(path):
    os.unlink(path)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
print("Starting to load model", flush=True)
if "silent" in words:
    time.sleep(600)
server.listen(8)
while True:
    server.accept()[0].close()
    if {"dead", "busy"} & set(words):
        os.unlink(path)
        server.close()
        if "dead" in words:
            time.sleep(600)
        while True:
            pass
"""


@dataclass
class Bench:
    """Starts runners and ends them."""

    folder: Path
    http: httpx2.AsyncClient
    sessions: set[int] = field(default_factory=set)
    changes: list[tuple[str, str]] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def component(self, name: str, *words: str, **more: Any) -> Component:
        socket = str(self.folder / f"{name}.sock")
        return Component(
            name=name,
            kind=more.pop("kind", "worker"),
            command=(sys.executable, "-c", SERVICE, socket, *words),
            probe=socket,
            log_file=self.folder / f"{name}.log",
            limits=more.pop("limits", Limits(grace_seconds=2, drain_seconds=0.1)),
            loading_markers=("Starting to load model",),
            **more,
        )

    def run(self, component: Component) -> Runner:
        runner = Runner(component, self.http, self._changed, self._session)
        self._tasks.append(asyncio.create_task(runner.run()))
        return runner

    async def started(self, component: Component) -> Runner:
        runner = self.run(component)
        runner.start()
        await self.until(lambda: runner.state is ProcessState.READY)
        return runner

    async def until(self, holds: Callable[[], object]) -> None:
        """Poll, with a generous bound: this may be a busy machine."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not holds():
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _changed(self, runner: Runner) -> None:
        change = (runner.component.name, runner.state.value)
        if change not in self.changes[-1:]:
            self.changes.append(change)

    def _session(self, session: int, begins: bool) -> None:
        (self.sessions.add if begins else self.sessions.discard)(session)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with httpx2.AsyncClient(trust_env=False) as http:
        made = Bench(tmp_path, http)
        yield made
        await made.close()
