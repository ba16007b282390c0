"""`run/supervisor.json`: what the supervisor of a data directory runs, for other processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

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
