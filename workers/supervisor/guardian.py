"""Ends everything once the supervisor is dead, however it died.

PDEATHSIG reaches only the supervisor's own children. The guardian also ends their children (an
engine is three processes) and removes the slabs. It reads lines from the supervisor's pipe:
`+session` and `-session` as processes come and go, `slab PATH`; end of file is the supervisor's end.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from workers.supervisor.procfs import kill_session, session_members, signal_session

GRACE_SECONDS = 6.0
POLL_SECONDS = 0.1
TRACKER_SECONDS = 1.0


def main() -> None:
    """Read until end of file, then clean up. Signals meant for the supervisor do not end it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    slabs: set[str] = set()
    with os.fdopen(0, "r") as lines:
        for line in lines:
            _note(line.strip(), sessions, slabs)
    end_sessions(sessions, GRACE_SECONDS)
    for slab in slabs:
        Path(slab).unlink(missing_ok=True)


def end_sessions(sessions: set[int], grace_seconds: float) -> int:
    """SIGTERM, then SIGKILL after the grace; returns how many processes had to be killed."""
    for session in sessions:
        signal_session(session, signal.SIGTERM)
    _wait_for(sessions, grace_seconds)
    left = sum(len(session_members(session)) for session in sessions)
    for session in sessions:
        kill_session(session)
    _wait_for(sessions, TRACKER_SECONDS)
    for session in sessions:
        signal_session(session, signal.SIGKILL)
    return left


def _wait_for(sessions: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(session_members(each) for each in sessions):
        time.sleep(POLL_SECONDS)


def _note(line: str, sessions: set[int], slabs: set[str]) -> None:
    if line.startswith("slab "):
        slabs.add(line.removeprefix("slab "))
    elif line.startswith("+"):
        sessions.add(int(line[1:]))
    elif line.startswith("-"):
        sessions.discard(int(line[1:]))


if __name__ == "__main__":
    main()
