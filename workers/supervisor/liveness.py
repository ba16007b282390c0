"""Looks at a process while it is probed; and whether the supervisor, starved itself, asks too late."""

from __future__ import annotations

from workers.core.liveness import Reading, Sign, Span, in_words, judge
from workers.core.supervision import ProbeFailed, ProbeSucceeded
from workers.supervisor.probes import PROBE_TIMEOUT_SECONDS
from workers.supervisor.procfs import reading

MAX_SAMPLES = 256


class Liveness:
    """Of one process at a time: `begin` each probe, `sample` during it, `ended` with its answer.

    What is judged lasts from the last probe's end to this one's: a refused connection takes no time.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._before: Reading | None = None
        self._before_at = self._began_at = 0.0
        self._states = ""

    def begin(self, pid: int, now: float) -> None:
        if pid != self._pid or self._before is None:
            self._pid, self._before, self._before_at = pid, reading(pid), now
        self._began_at, self._states = now, ""

    def sample(self) -> None:
        found = reading(self._pid) if len(self._states) < MAX_SAMPLES else None
        self._states += "" if found is None else found.state

    def ended(self, *, answered: bool, now: float) -> ProbeSucceeded | ProbeFailed:
        """A stopped process answers nothing, though its socket still takes connections."""
        before, after = self._before, reading(self._pid)
        seconds, late = now - self._before_at, now - self._began_at - PROBE_TIMEOUT_SECONDS
        self._before, self._before_at = after, now
        if answered and (after is None or not after.is_stopped):
            return ProbeSucceeded()
        if before is None or after is None:
            return ProbeFailed(Sign.STILL)
        span = Span(before, after, self._states, seconds, late)
        sign = judge(span)
        return ProbeFailed(sign, in_words(span, sign))
