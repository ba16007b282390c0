"""Tasks that run as long as the control plane does. One owner starts and ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from controlplane.clock import Clock
from controlplane.loops.auditor import AUDIT_SECONDS, Auditor
from controlplane.loops.directory import DirectoryWatch
from controlplane.loops.ending import end_tasks
from controlplane.loops.jobs import JobRunner
from controlplane.overview.service import TICK_WINDOW_SECONDS
from controlplane.plane import Plane

SWEEP_SECONDS = 0.5
SAVE_SECONDS = 1.0
PRUNE_SECONDS = 60.0
REFRESH_SECONDS = 2.0
DIRECTORY_SECONDS = 1.0
JOBS_SECONDS = 0.25
PASS_TIMEOUT_SECONDS = 30.0
QUIET_SECONDS = 60.0
"""An error that repeats is logged once in this time."""

log = structlog.get_logger("controlplane")
Step = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Loop:
    """Calls `step` every `seconds`. An error is logged and counted; the loop goes on."""

    name: str
    step: Step
    seconds: float
    clock: Clock
    errors: int = 0
    _logged_at: float = float("-inf")

    async def run(self) -> None:
        due = self.clock.monotonic()
        while True:
            due = max(due + self.seconds, self.clock.monotonic())
            await asyncio.sleep(due - self.clock.monotonic())
            try:
                async with asyncio.timeout(PASS_TIMEOUT_SECONDS):
                    await self.step()
            except Exception as error:
                self._note(error)

    def _note(self, error: Exception) -> None:
        self.errors += 1
        now = self.clock.monotonic()
        if now - self._logged_at >= QUIET_SECONDS:
            self._logged_at = now
            log.error("loop failed", loop=self.name, error=f"{type(error).__name__}: {error}"[:500])


class Loops:
    """Everything that happens without a request. `async with` runs it."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._last_second = int(plane.clock.now().timestamp())
        self._jobs = JobRunner(plane)
        self._auditor = Auditor(plane)
        self._directory = DirectoryWatch(plane)
        self.all = [
            Loop("sweep", self._sweep, SWEEP_SECONDS, plane.clock),
            Loop("tick", self._tick, 1.0, plane.clock),
            Loop("refresh", self._refresh, REFRESH_SECONDS, plane.clock),
            Loop("save", plane.save, SAVE_SECONDS, plane.clock),
            Loop("jobs", self._jobs.step, JOBS_SECONDS, plane.clock),
            Loop("audit_index", self._auditor.step, AUDIT_SECONDS, plane.clock),
            Loop("prune", plane.prune, PRUNE_SECONDS, plane.clock),
        ]
        if plane.settings.directory:
            self.all.append(Loop("directory", self._directory.step, DIRECTORY_SECONDS, plane.clock))
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Loops:
        self._tasks = [asyncio.create_task(loop.run(), name=loop.name) for loop in self.all]
        return self

    async def __aexit__(self, *_error: object) -> None:
        await end_tasks(self._tasks)
        await self._jobs.close()
        await self._auditor.close()
        await self._directory.close()
        try:
            async with asyncio.timeout(5):
                await self._plane.save()
        except Exception as error:
            log.warning("last save failed", error=f"{type(error).__name__}: {error}"[:500])

    async def _sweep(self) -> None:
        self._plane.sweep()

    async def _tick(self) -> None:
        """Close the seconds that are over and tell who listens."""
        plane = self._plane
        now = int(plane.clock.now().timestamp())
        # after a stall the missing seconds are gaps: closing them one by one would change nothing
        if now > self._last_second:
            plane.stats.second(now - 1)
            self._last_second = now
        # built also when nobody listens: NEEDS ATTENTION tells since when
        overview = await plane.overview.build(TICK_WINDOW_SECONDS)
        if plane.bus.num_subscribers:
            data: dict[str, object] = {
                "at": float(now),
                "overview": overview.model_dump(mode="json"),
                "points": plane.stats.points(),
            }
            plane.bus.publish_passing("tick", data)

    async def _refresh(self) -> None:
        plane = self._plane
        if plane.bus.num_subscribers:
            plane.announcer.refresh(plane.nodes.list(), plane.fleet.list(), plane.gateways.list())
