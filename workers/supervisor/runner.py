"""The shell around one `SupervisedProcess`: spawns, probes, follows and ends the real process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from workers.core.supervision import (
    ALIVE,
    Command,
    DrainRequested,
    Event,
    Exited,
    ProcessState,
    Progressed,
    RestartRequested,
    ResumeRequested,
    StartRequested,
    StopRequested,
    SupervisedProcess,
    Ticked,
)
from workers.supervisor.liveness import Liveness
from workers.supervisor.logs import BoundedLog, last_error_line
from workers.supervisor.probes import answers
from workers.supervisor.procfs import identify
from workers.supervisor.session_end import SessionEnd, kill_session
from workers.supervisor.state_file import ComponentState

if TYPE_CHECKING:
    import httpx2

    from workers.supervisor.component import Component

TICK_SECONDS = 0.1
PROBE_SECONDS = 1.0
START_PROBE_SECONDS = 0.25
NOTE_SECONDS = 10.0
"""At most so often it is told that a process still does not answer."""
LEFTOVER_GRACE_SECONDS = 2.0
CHUNK_BYTES = 64 * 1024
ENDED_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ACTIONS: dict[str, Event] = {
    "restart": RestartRequested(),
    "drain": DrainRequested(),
    "resume": ResumeRequested(),
}
log = logging.getLogger(__name__)


class Runner:
    """Owns one process from its start to the end of its whole session."""

    def __init__(
        self,
        component: Component,
        http: httpx2.AsyncClient,
        on_change: Callable[[Runner], None],
        on_session: Callable[[int, bool], None],
    ) -> None:
        """`on_session(session, begins)` tells the guardian; `on_change` follows each transition."""
        self.component = component
        self.process = SupervisedProcess(component.limits)
        self.pid = 0
        self.started_at = 0.0  # seconds since the epoch
        self.since = 0.0
        self.seconds_to_ready: float | None = None
        self._launched_at = 0.0
        self._start_ticks = 0
        self._http = http
        self._on_change = on_change
        self._on_session = on_session
        self._child: asyncio.subprocess.Process | None = None
        self._log = BoundedLog(component.log_file)
        self._liveness = Liveness()
        self._noted_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> ProcessState:
        return self.process.state

    def feed(self, event: Event) -> None:
        """Hand an event to the core and carry out what it says."""
        before = self.process.state, self.process.restarts
        for command in self.process.handle(event, time.monotonic()):
            self._perform(command)
        if (self.process.state, self.process.restarts) != before:
            self.since = _epoch()
            if self.process.state is ProcessState.READY and before[0] is not ProcessState.DRAINING:
                self.seconds_to_ready = time.monotonic() - self._launched_at
            self._on_change(self)

    def start(self) -> None:
        self.feed(StartRequested())

    def stop(self) -> None:
        self.feed(StopRequested())

    def kill(self) -> None:
        """End the whole session now; the core learns of it by `Exited`."""
        if self.pid:
            kill_session(self.pid)

    def act(self, action: str) -> None:
        """`restart`, `drain` or `resume`."""
        self.feed(ACTIONS[action])

    async def run(self) -> None:
        """Tick and probe until cancelled; then end the process at once."""
        next_probe = 0.0
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                self.feed(Ticked())
                now = time.monotonic()
                if now >= next_probe and self._is_probed():
                    await self._probe()
                    fast = self.state in {ProcessState.LAUNCHING, ProcessState.LOADING}
                    next_probe = now + (START_PROBE_SECONDS if fast else PROBE_SECONDS)
        finally:
            await self._end_at_once()
            self._log.close()

    def snapshot(self) -> ComponentState:
        """As `supervisor.json` shows it."""
        return ComponentState(
            name=self.component.name,
            kind=self.component.kind,
            state=self.process.state.value,
            pid=self.pid,
            start_ticks=self._start_ticks,
            since=self.since,
            restarts=self.process.restarts,
            url=self.component.url,
            log_file=str(self.component.log_file),
            last_error=self.process.last_error,
            note=self.process.note,
        )

    def _is_probed(self) -> bool:
        return self._child is not None and self.state in ALIVE - {ProcessState.STOPPING}

    async def _probe(self) -> None:
        child, liveness = self._child, self._liveness
        liveness.begin(self.pid, time.monotonic())
        probe = asyncio.ensure_future(answers(self.component.probe, self._http))
        try:
            while not probe.done():
                await asyncio.wait((probe,), timeout=TICK_SECONDS)
                liveness.sample()
        finally:
            probe.cancel()
        if child is not self._child or child is None:
            return
        before = self.process.note
        self.feed(liveness.ended(answered=probe.result(), now=time.monotonic()))
        self._tell(before)

    def _tell(self, before: str) -> None:
        """What is to be said of a process that runs and does not answer, not at each probe."""
        note, now = self.process.note, time.monotonic()
        if bool(note) == bool(before) and (not note or now - self._noted_at < NOTE_SECONDS):
            return
        self._noted_at = now
        if note:
            log.warning("%s: %s", self.component.name, note)
        elif self.state in {ProcessState.READY, ProcessState.DRAINING}:
            log.warning("%s answers again", self.component.name)
        self._on_change(self)

    def _perform(self, command: Command) -> None:
        match command:
            case Command.SPAWN:
                self._launched_at = time.monotonic()
                task = asyncio.create_task(
                    self._live_or_say_why(), name=f"live {self.component.name}"
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Command.TERMINATE:
                self._signal_leader(signal.SIGTERM)
            case Command.KILL:
                self.kill()

    def _signal_leader(self, number: signal.Signals) -> None:
        # Only the leader: it ends its own children in order.
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(number)

    async def _live_or_say_why(self) -> None:
        try:
            await self._live()
        except Exception as error:  # ours or the system's: the process must not be forgotten
            log.exception("%s", self.component.name)
            self.kill()
            self._child, self.pid = None, 0
            self.feed(Exited(f"cannot be supervised: {error}"))

    async def _live(self) -> None:
        """One process: from spawn to the end of its last descendant."""
        command = self.component.command
        self._log.begin(" ".join(command))
        # A pipe of our own: asyncio's would make `wait` wait for every holder of its other end.
        output, its_end = os.pipe()
        try:
            child = await self._spawn(command, its_end)
        except OSError as error:
            os.close(output)
            self.feed(Exited(f"cannot start {command[0]}: {error.strerror}"))
            return
        finally:
            os.close(its_end)
        os.set_blocking(output, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(output, self._take_output, output)
        self._begin(child)
        try:
            status = await child.wait()
            await self._end_leftovers(child.pid)
            while self._take_output(output):
                pass
        finally:
            loop.remove_reader(output)
            os.close(output)
        self._finish(child, status)

    async def _spawn(self, command: tuple[str, ...], output: int) -> asyncio.subprocess.Process:
        wrapper = (sys.executable, "-m", "workers.supervisor.child", str(os.getpid()))
        return await asyncio.create_subprocess_exec(
            *wrapper,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **self.component.environment},
            cwd=self.component.log_file.parent,  # `python -m` would import from the shell's folder
            start_new_session=True,
        )

    def _begin(self, child: asyncio.subprocess.Process) -> None:
        self._child, self.pid, self.started_at = child, child.pid, _epoch()
        identity = identify(child.pid)
        self._start_ticks = identity.start_ticks if identity else 0
        self._on_session(child.pid, True)
        self._on_change(self)
        if self.state is ProcessState.STOPPING:  # asked while it was being spawned
            self._signal_leader(signal.SIGTERM)

    def _finish(self, child: asyncio.subprocess.Process, status: int) -> None:
        self._on_session(child.pid, False)
        self._child, self.pid, self._start_ticks = None, 0, 0
        self.feed(Exited(_cause(status, list(self._log.lines))))

    def _take_output(self, output: int) -> bool:
        """Copy what is there into the log; False when there is nothing (more) to read."""
        try:
            chunk = os.read(output, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:  # closed by all: without this, the loop would call again and again
            asyncio.get_running_loop().remove_reader(output)
            return False
        for line in self._log.write(chunk):
            if any(marker in line for marker in self.component.loading_markers):
                self.feed(Progressed())
        return True

    async def _end_leftovers(self, session: int) -> None:
        """What outlives the leader (an engine's core after its API process was killed) ends too."""
        end = SessionEnd(session, LEFTOVER_GRACE_SECONDS, time.monotonic())
        while True:
            if end.step(time.monotonic()):
                return
            await asyncio.sleep(TICK_SECONDS)

    async def _end_at_once(self) -> None:
        self.stop()
        self.kill()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=2 * LEFTOVER_GRACE_SECONDS)


def _cause(status: int, lines: list[str]) -> str:
    """`status` as asyncio gives it: negative for a signal."""
    if -status in ENDED_FROM_OUTSIDE:  # nothing that it said explains it
        return f"killed by {signal.Signals(-status).name}"
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    line = last_error_line(lines)
    return f"{how}: {line}" if line else how


def _epoch() -> float:
    return time.time()  # noqa: TID251 - shown to people, never computed with
