"""Decisions about one supervised process: start, restart with backoff, drain, stop.

    waiting ─StartRequested─▶ launching ─Progressed─▶ loading ─ProbeSucceeded─▶ ready ◀─Resume─┐
                                 ▲                       │                      │ └─Drain─▶ draining
                                 └──── backoff ◀─ failed ◀──── Exited ──────────┘
    any ─StopRequested─▶ stopping ─Exited─▶ stopped

Values in, commands out; `now` is monotonic seconds. A process is never given up: a failing one is
tried again every `MAX_BACKOFF_SECONDS` and shows its last error meanwhile.

One that is ready and answers no probe is killed after `hang_seconds`. The time in which it was seen
at work, or kept from it by others, does not count: to kill it would cost the machine its start as
well. `PATIENCE` bounds that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from workers.core.liveness import Sign

MAX_BACKOFF_SECONDS = 30.0
STEADY_SECONDS = 60.0
"""So long ready, and the backoff starts at 1 s again."""
PATIENCE = 5
"""Times `hang_seconds` without any answer, whatever it does."""
START_PATIENCE = 3
"""Times `start_seconds`, while it is kept from CPU, memory or disk."""
MAX_STEP_SECONDS = 5.0
"""Between two probes; of a longer time the supervisor itself has slept, and knows nothing."""
NOTED_SECONDS = 10.0
"""Silence that is worth telling."""


class ProcessState(StrEnum):
    """What an operator sees of a process."""

    WAITING = "waiting"
    LAUNCHING = "launching"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


ALIVE = frozenset(
    {
        ProcessState.LAUNCHING,
        ProcessState.LOADING,
        ProcessState.READY,
        ProcessState.DRAINING,
        ProcessState.STOPPING,
    }
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one process, in seconds."""

    start_seconds: float = 60.0  # until ready, else it is killed and counts as failed
    hang_seconds: float = 60.0  # ready, no probe answered and nothing done for so long: killed
    drain_seconds: float = 2.0  # between announcing a restart and SIGTERM
    grace_seconds: float = 10.0  # between SIGTERM and SIGKILL


# --- events: what happened ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartRequested:
    """What it depends on is ready."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """It said that it is loading."""


@dataclass(frozen=True, slots=True)
class ProbeSucceeded:
    """It answered its health probe."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """It did not; `seen` says in words what it does instead."""

    sign: Sign
    seen: str = ""


@dataclass(frozen=True, slots=True)
class Exited:
    """It ended; `error` is the best line to show for it."""

    error: str


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """An operator wants it new."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants no new work on it."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """An operator wants it back at work."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """It shall end and stay ended."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


Event = (
    StartRequested
    | Progressed
    | ProbeSucceeded
    | ProbeFailed
    | Exited
    | RestartRequested
    | DrainRequested
    | ResumeRequested
    | StopRequested
    | Ticked
)


class Command(StrEnum):
    """What the shell must do; each is answered by an event sooner or later."""

    SPAWN = "spawn"
    TERMINATE = "terminate"
    KILL = "kill"


def backoff_seconds(failures: int) -> float:
    """Pause before the next start after so many failures in a row: 1, 2, 4, ... 30 s."""
    return min(2.0 ** max(failures - 1, 0), MAX_BACKOFF_SECONDS)


@dataclass(slots=True)
class SupervisedProcess:
    """State of one process. `deadline` is what `Ticked` compares with in the current state."""

    limits: Limits
    state: ProcessState = ProcessState.WAITING
    since: float = 0.0
    restarts: int = 0
    failures: int = 0  # in a row
    last_error: str = ""
    deadline: float | None = None
    last_probe: float = 0.0
    silent_seconds: float = 0.0  # without an answer, as far as probes were made
    excused_seconds: float = 0.0  # of these, seen at work or kept from it
    sign: Sign = Sign.STILL  # at the last probe without an answer
    seen: str = ""  # the same in words
    restarting: bool = False
    keep_draining: bool = False
    kill_reason: str = ""  # why we killed it: a better cause than its exit status

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; returns what to do."""
        match event:
            case StartRequested():
                return self._start(now) if self.state is ProcessState.WAITING else []
            case Progressed():
                return self._progress(now)
            case ProbeSucceeded() | ProbeFailed():
                return self._probed(event, now)
            case Exited(error):
                return self._exited(error, now)
            case RestartRequested():
                return self._restart(now)
            case DrainRequested():
                return self._drain(now)
            case ResumeRequested():
                return self._resume(now)
            case StopRequested():
                return self._stop(now)
            case Ticked():
                return self._tick(now)

    def check_integrity(self) -> None:
        """Raise AssertionError where the fields contradict each other."""
        assert self.restarts >= 0
        assert self.failures >= 0
        assert 0 <= self.excused_seconds <= self.silent_seconds
        if self.state is ProcessState.FAILED:
            assert self.deadline is not None
            assert self.failures > 0
        if self.restarting:
            assert self.state in {ProcessState.DRAINING, ProcessState.STOPPING}
        if self.state in {ProcessState.WAITING, ProcessState.STOPPED}:
            assert self.deadline is None

    def _enter(self, state: ProcessState, now: float, deadline: float | None = None) -> None:
        self.state, self.since, self.deadline = state, now, deadline

    def _start(self, now: float) -> list[Command]:
        self.kill_reason = ""
        self._heard(now)
        self._enter(ProcessState.LAUNCHING, now, now + self.limits.start_seconds)
        return [Command.SPAWN]

    def _progress(self, now: float) -> list[Command]:
        if self.state is ProcessState.LAUNCHING:
            self._enter(ProcessState.LOADING, now, self.deadline)
        return []

    def _probed(self, event: ProbeSucceeded | ProbeFailed, now: float) -> list[Command]:
        return (
            self._unanswered(event, now) if isinstance(event, ProbeFailed) else self._answered(now)
        )

    def _answered(self, now: float) -> list[Command]:
        self._heard(now)
        if self.state in {ProcessState.LAUNCHING, ProcessState.LOADING}:
            self._enter(ProcessState.DRAINING if self.keep_draining else ProcessState.READY, now)
        return []

    def _heard(self, now: float) -> None:
        self.last_probe, self.seen = now, ""
        self.silent_seconds = self.excused_seconds = 0.0

    def _unanswered(self, event: ProbeFailed, now: float) -> list[Command]:
        step = min(max(now - self.last_probe, 0.0), MAX_STEP_SECONDS)
        self.last_probe, self.seen = now, event.seen or event.sign.value
        self.sign = event.sign
        self.silent_seconds += step
        if self.state in {ProcessState.LAUNCHING, ProcessState.LOADING}:
            self._wait_for_start(event.sign, step)
        elif self.state in {ProcessState.READY, ProcessState.DRAINING}:
            self.excused_seconds += step if event.sign.is_progress else 0.0
            if self._hangs():
                return [Command.KILL]
        return []

    def _wait_for_start(self, sign: Sign, step: float) -> None:
        """A start that others hold up may take longer."""
        most = (START_PATIENCE - 1) * self.limits.start_seconds
        if sign is Sign.STARVED and self.deadline is not None and not self.kill_reason:
            more = min(step, most - self.excused_seconds)
            self.excused_seconds += more
            self.deadline += more

    def _why_not_ready(self) -> str:
        seconds = self.limits.start_seconds + self.excused_seconds
        why = f": {self.seen}" if self.excused_seconds else ""
        return f"not ready within {seconds:.0f} s{why}"

    def _hangs(self) -> bool:
        silent, limit = self.silent_seconds, self.limits.hang_seconds
        if silent - self.excused_seconds < limit and silent < PATIENCE * limit:
            return False
        self.kill_reason = f"no answer to health probes for {silent:.0f} s: {self.seen}"
        self.silent_seconds = self.excused_seconds = 0.0  # one kill per period
        return True

    @property
    def note(self) -> str:
        """What there is to say of one that runs and does not answer; else empty."""
        silent, limit = self.silent_seconds, self.limits.hang_seconds
        serves = self.state in {ProcessState.READY, ProcessState.DRAINING}
        if not serves or silent < min(NOTED_SECONDS, limit / 2):
            return ""
        left = PATIENCE * limit - silent
        if not self.sign.is_progress:
            left = min(left, limit - (silent - self.excused_seconds))
        return f"no answer for {silent:.0f} s: {self.seen}; killed in {left:.0f} s if that stays so"

    def _exited(self, error: str, now: float) -> list[Command]:
        match self.state:
            case ProcessState.STOPPING if self.restarting:
                self.restarting = False
                self.restarts += 1
                self.failures = 0
                return self._start(now)
            case ProcessState.STOPPING:
                self._enter(ProcessState.STOPPED, now)
            case ProcessState.WAITING | ProcessState.STOPPED | ProcessState.FAILED:
                pass
            case _:
                self._fail(error, now)
        return []

    def _fail(self, error: str, now: float) -> None:
        was_serving = self.state in {ProcessState.READY, ProcessState.DRAINING}
        if was_serving and now - self.since >= STEADY_SECONDS:
            self.failures = 0
        self.failures += 1
        self.last_error, self.kill_reason = self.kill_reason or error, ""
        self.restarting = False
        self._enter(ProcessState.FAILED, now, now + backoff_seconds(self.failures))

    def _restart(self, now: float) -> list[Command]:
        match self.state:
            case ProcessState.FAILED:
                self.restarts += 1
                self.failures = 0
                return self._start(now)
            case ProcessState.READY | ProcessState.DRAINING:
                self.restarting, self.keep_draining = True, False
                self._enter(ProcessState.DRAINING, now, now + self.limits.drain_seconds)
            case ProcessState.LAUNCHING | ProcessState.LOADING:
                self.restarting = True
                return self._terminate(now)
            case ProcessState.WAITING | ProcessState.STOPPING | ProcessState.STOPPED:
                pass
        return []

    def _drain(self, now: float) -> list[Command]:
        self.keep_draining = True
        if self.state is ProcessState.READY:
            self._enter(ProcessState.DRAINING, now)
        return []

    def _resume(self, now: float) -> list[Command]:
        self.keep_draining = False
        if self.state is ProcessState.DRAINING and not self.restarting:
            self._enter(ProcessState.READY, now)
        return []

    def _stop(self, now: float) -> list[Command]:
        self.restarting = False
        if self.state is ProcessState.STOPPING:
            return []
        if self.state in ALIVE:
            return self._terminate(now)
        self._enter(ProcessState.STOPPED, now)
        return []

    def _terminate(self, now: float) -> list[Command]:
        self._enter(ProcessState.STOPPING, now, now + self.limits.grace_seconds)
        return [Command.TERMINATE]

    def _tick(self, now: float) -> list[Command]:
        if self.deadline is None or now < self.deadline:
            return []
        match self.state:
            case ProcessState.FAILED:
                self.restarts += 1
                return self._start(now)
            case ProcessState.DRAINING:
                return self._terminate(now)
            case ProcessState.STOPPING:
                self.deadline = now + self.limits.grace_seconds
                return [Command.KILL]
            case ProcessState.LAUNCHING | ProcessState.LOADING:
                self.kill_reason = self._why_not_ready()
                self.deadline = now + self.limits.grace_seconds
                return [Command.KILL]
            case ProcessState.READY | ProcessState.WAITING | ProcessState.STOPPED:
                return []
