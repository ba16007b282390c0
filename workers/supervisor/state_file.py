"""`run/supervisor.json`: what the supervisor of a data directory runs, for other processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import msgspec

from workers.supervisor.procfs import ProcessIdentity, identify

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

ClusterState = Literal["starting", "ready", "stopping"]


class ComponentState(msgspec.Struct, frozen=True):
    """One supervised process. `since` is in seconds since the epoch."""

    name: str
    kind: Literal["controlplane", "gateway", "agent", "worker"]
    state: str  # workers.core.supervision.ProcessState
    pid: int = 0  # 0 while it does not run; it leads a session of its own
    start_ticks: int = 0
    since: float = 0.0
    restarts: int = 0
    url: str = ""
    log_file: str = ""
    last_error: str = ""
    note: str = ""  # that it runs and does not answer, and what it does instead


class SupervisorState(msgspec.Struct, frozen=True):
    """The whole file."""

    pid: int
    start_ticks: int
    cluster: str
    state: ClusterState
    started_at: float
    control_plane_url: str
    gateway_url: str
    model: str
    engine: str
    slab_paths: list[str] = []
    components: list[ComponentState] = []


def write_state(path: Path, state: SupervisorState) -> None:
    """Replace the file atomically."""
    fresh = path.with_suffix(".tmp")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1))
    os.replace(fresh, path)


def read_state(path: Path) -> SupervisorState | None:
    """None where there is none, or none that this version can read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SupervisorState)
    except (OSError, msgspec.MsgspecError):
        return None


def write_holder(lock: TextIO) -> None:
    """Say in the held lock file who holds it: `supervisor.json` may be missing or unreadable."""
    own = identify(os.getpid())
    lock.truncate(0)
    lock.write(f"{os.getpid()} {own.start_ticks if own else 0}\n")
    lock.flush()


def read_holder(path: Path) -> ProcessIdentity | None:
    """The process that runs `up` here; None where there is none."""
    try:
        pid, start_ticks = map(int, path.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return None
    found = ProcessIdentity(pid, start_ticks)
    return found if found.is_alive() else None
