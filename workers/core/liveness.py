"""Whether a process that does not answer is at work, kept from it, or will never answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

BUSY_SHARE: Final = 0.05
"""Of one core: timers of a process that is stuck need less."""
FULL_SHARE: Final = 0.5
"""Who is always ready to run and gets less of a core than this is kept waiting for it."""
RUNNABLE_SHARE: Final = 0.5
BLOCKED_SHARE: Final = 0.3
WAITED_SHARE: Final = 0.2
FAULTS_PER_SECOND: Final = 10.0
"""Pages that had to be read back: memory is short."""
LATE_SECONDS: Final = 0.5
"""So much later than due, and whoever asks is starved too: its silence says nothing."""


class Sign(StrEnum):
    """What it does meanwhile, in words for people."""

    STILL = "it does nothing"
    STOPPED = "it is stopped"
    BUSY = "it computes"
    STARVED = "it waits for CPU, memory or disk"

    @property
    def is_progress(self) -> bool:
        return self in {Sign.BUSY, Sign.STARVED}


@dataclass(frozen=True, slots=True)
class Reading:
    """What the kernel says of a process. `state`: of its main thread, as in proc(5). Seconds and
    counts since its start; `waited_seconds` 0 where the kernel does not count them."""

    state: str
    cpu_seconds: float
    waited_seconds: float  # of the main thread, ready to run and not running
    major_faults: int

    @property
    def is_stopped(self) -> bool:
        """By a signal or a debugger."""
        return self.state in "Tt"


@dataclass(frozen=True, slots=True)
class Span:
    """Between two readings of one process, with the states that were seen in between."""

    before: Reading
    after: Reading
    states: str
    seconds: float
    late_seconds: float = 0.0  # by how much the asking took longer than it may

    def share(self, states: str) -> float:
        seen = self.states or self.after.state
        return sum(state in states for state in seen) / len(seen)

    @property
    def cpu_share(self) -> float:
        if self.seconds <= 0:
            return 0.0
        return (self.after.cpu_seconds - self.before.cpu_seconds) / self.seconds


def judge(span: Span) -> Sign:
    """What the span shows. One that lasts no time shows nothing."""
    if span.after.is_stopped:
        return Sign.STOPPED
    if span.seconds <= 0:
        return Sign.STILL
    before, after = span.before, span.after
    faults = (after.major_faults - before.major_faults) / span.seconds
    waited = (after.waited_seconds - before.waited_seconds) / span.seconds
    runnable = span.share("R") >= RUNNABLE_SHARE
    if (
        faults >= FAULTS_PER_SECOND
        or waited >= WAITED_SHARE
        or span.share("D") >= BLOCKED_SHARE
        or (runnable and span.cpu_share < FULL_SHARE)
        or span.late_seconds >= LATE_SECONDS
    ):
        return Sign.STARVED
    if runnable or span.cpu_share >= BUSY_SHARE:
        return Sign.BUSY
    return Sign.STILL


def in_words(span: Span, sign: Sign) -> str:
    """For logs: what was seen, and what it means."""
    return f"{sign.value} (state {span.after.state}, {span.cpu_share:.0%} of a core)"
