"""What the supervisor needs to know of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from workers.core.supervision import Limits

DEFAULT_LIMITS = Limits()
Kind = Literal["controlplane", "gateway", "agent", "worker"]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """How a worker process appears in the cluster."""

    worker_id: str
    role: Literal["prefill", "decode", "both"]
    model: str
    engine: Literal["vllm", "emulated"]
    agent_socket: Path


@dataclass(frozen=True, slots=True)
class Component:
    """One process to run.

    `probe` is an http URL that answers 200, or the path of a Unix socket that accepts.
    It starts when all of `after` are ready. At the end, stages stop one after the other, lowest
    first. A line of output that contains one of `loading_markers` means that it is loading.
    """

    name: str
    kind: Kind
    command: tuple[str, ...]
    probe: str
    log_file: Path
    url: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    limits: Limits = DEFAULT_LIMITS
    after: tuple[str, ...] = ()
    stop_stage: int = 0
    loading_markers: tuple[str, ...] = ()
    worker: WorkerIdentity | None = None
