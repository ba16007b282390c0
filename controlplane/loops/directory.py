"""Reads the directory, where there is one: a cold start's beliefs, and whether the store is well.

Nothing waits for it. While the store is silent the last known view stays in use.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from controlplane.index_audit.schemas import DirectoryStatus
from controlplane.loops.ending import end_tasks
from controlplane.plane import Plane
from workers.clock import SystemClock
from workers.core.ids import NodeId
from workers.directory.address import open_directory
from workers.directory.base import (
    Directory,
    DirectoryError,
    DirectoryReadOnlyError,
    Leadership,
    LeaseLostError,
)
from workers.directory.view import DirectoryView

LEADER = "control-plane"
LEADER_SECONDS = 15.0
CHECK_SECONDS = 5.0

log = structlog.get_logger("controlplane")


class DirectoryWatch:
    """`step` is called every second; it starts what runs beside it. `close` ends everything."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self.view = DirectoryView(index=plane.index_audit.index, owns_index=False)
        self._directory: Directory | None = None
        self._leadership: Leadership | None = None
        self._read_only = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def step(self) -> None:
        if self._directory is None:
            settings = self._plane.settings
            self._directory = open_directory(settings.directory, settings.cluster, SystemClock())
            loops = (self._watch(self._directory), self._check(self._directory))
            self._tasks = [asyncio.create_task(loop) for loop in loops]
        for node_id in self.view.sweep(self._plane.clock.monotonic()):
            if self._plane.nodes.state_of(node_id) is None:
                self._plane.index_audit.index.drop_node(NodeId(node_id))
        self._plane.index_audit.directory = self._status()

    async def close(self) -> None:
        await end_tasks(self._tasks)
        if self._leadership is not None:
            await self._leadership.resign()
        if self._directory is not None:
            await self._directory.close()

    async def _watch(self, directory: Directory) -> None:
        async with contextlib.aclosing(directory.changes()) as changes:  # type: ignore[type-var]  # it is an async generator
            async for change in changes:
                self.view.take(change, self._plane.clock.monotonic())

    async def _check(self, directory: Directory) -> None:
        """Whether it takes writes; and the leader's place, for those who ask who leads."""
        while True:
            try:
                await directory.check_writable()
                await self._lead(directory)
            except DirectoryReadOnlyError as error:
                if not self._read_only:
                    log.warning("directory is read-only", reason=str(error))
                self._read_only = str(error)
            except LeaseLostError:
                self._leadership = None
            except DirectoryError as error:
                log.debug("directory does not answer", reason=str(error))
            else:
                self._read_only = ""
            await asyncio.sleep(CHECK_SECONDS)

    async def _lead(self, directory: Directory) -> None:
        if self._leadership is not None:
            await self._leadership.renew()
            return
        holder = f"{self._plane.bus.boot_id}"
        self._leadership = await directory.campaign(LEADER, holder, LEADER_SECONDS)

    def _status(self) -> DirectoryStatus:
        view = self.view
        read_only = view.state == "current" and self._read_only
        return DirectoryStatus.model_validate(
            {
                "state": "read_only" if read_only else view.state,
                "reason": self._read_only if read_only else view.reason,
                "nodes": len(view.nodes),
                "suspect_nodes": sorted(view.suspect_since),
            }
        )
