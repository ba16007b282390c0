"""Ends everything once the supervisor is dead, however it died.

PDEATHSIG reaches only the supervisor's own children. The guardian also ends their children (an
engine is three processes) and removes the slabs. It reads lines from the supervisor's pipe:
`+session` and `-session` as processes come and go, `slab PATH`; end of file is the supervisor's end.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from workers.supervisor.session_end import end_sessions

GRACE_SECONDS = 6.0


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


def _note(line: str, sessions: set[int], slabs: set[str]) -> None:
    if line.startswith("slab "):
        slabs.add(line.removeprefix("slab "))
    elif line.startswith("+"):
        sessions.add(int(line[1:]))
    elif line.startswith("-"):
        sessions.discard(int(line[1:]))


if __name__ == "__main__":
    main()
