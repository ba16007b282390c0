"""How a session of processes is ended: SIGTERM, SIGKILL after a grace, its resource trackers last.

A tracker (Python's, one an engine) ends by itself once all others of its session are gone, after
removing the shared memory and semaphores that a killed process could not remove. Killed before,
it leaves them in /dev/shm until the machine restarts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

from workers.supervisor.procfs import is_resource_tracker, session_members

STUCK_SECONDS = 4.0
"""After SIGKILL: what is still there sleeps uninterruptibly and is not ours to wait for."""
TRACKER_SECONDS = 10.0
"""A tracker that is alone has a few files to remove; on a busy machine that may take its time."""
POLL_SECONDS = 0.1


class SessionEnd:
    """One session's end. `step` now and then until it says that there is nothing to wait for."""

    def __init__(self, session: int, grace_seconds: float, now: float) -> None:
        """Asks all of it to end. `now` is monotonic seconds, as in `step`."""
        self.num_killed = 0
        self._session = session
        self._kill_at = now + grace_seconds
        self._alone_since: float | None = None
        _signal(session_members(session), signal.SIGTERM)

    def step(self, now: float) -> bool:
        """True: it is gone, or what is left cannot be ended."""
        members = session_members(self._session)
        others = [pid for pid in members if not is_resource_tracker(pid)]
        if others:
            self._alone_since = None
            if now >= self._kill_at:
                self.num_killed = max(self.num_killed, len(others))
                _signal(others, signal.SIGKILL)
            return now >= self._kill_at + STUCK_SECONDS
        if members:
            self._alone_since = self._alone_since or now
            if now < self._alone_since + TRACKER_SECONDS:
                return False
            _signal(members, signal.SIGKILL)
        return True


def end_sessions(sessions: Iterable[int], grace_seconds: float) -> int:
    """End them together and wait for it; returns how many processes had to be killed."""
    ends = [SessionEnd(session, grace_seconds, time.monotonic()) for session in sessions]
    waiting = ends
    while waiting := [end for end in waiting if not end.step(time.monotonic())]:
        time.sleep(POLL_SECONDS)
    return sum(end.num_killed for end in ends)


def kill_session(session: int) -> None:
    """SIGKILL at once for all but its resource trackers."""
    _signal(
        [pid for pid in session_members(session) if not is_resource_tracker(pid)], signal.SIGKILL
    )


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
