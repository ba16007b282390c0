"""What the node agent is told of workers, and what it asks for."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.core.messages import WorkerCommand
from workers.supervisor.component import WorkerIdentity
from workers.supervisor.reporter import obey, statuses

Bench = Any


def worker(bench: Bench, folder: Path, *words: str) -> Any:
    identity = WorkerIdentity("p1", "prefill", "m", "vllm", folder / "agent.sock")
    return replace(bench.component("worker-p1", *words), worker=identity, url="http://x:1")


async def test_a_running_worker_with_its_memory(bench: Bench, tmp_path: Path) -> None:
    runner = await bench.started(worker(bench, tmp_path))
    [status] = statuses([runner])
    assert (status.worker_id, status.role, status.state) == ("p1", "prefill", "ready")
    assert (status.pid, status.url) == (runner.pid, "http://x:1")
    assert status.rss_bytes > 1_000_000


async def test_a_worker_that_never_started_is_launching(bench: Bench, tmp_path: Path) -> None:
    [status] = statuses([bench.run(worker(bench, tmp_path))])
    assert (status.state, status.pid, status.rss_bytes) == ("launching", 0, 0)


async def test_a_command_is_carried_out_once(bench: Bench, tmp_path: Path) -> None:
    runner = await bench.started(worker(bench, tmp_path))
    done: deque[str] = deque(maxlen=10)
    drain = WorkerCommand("p1", "drain", "c1")
    obey([drain], [runner], done)
    assert statuses([runner])[0].state == "draining"
    obey([WorkerCommand("p1", "resume", "c2"), drain], [runner], done)
    assert statuses([runner])[0].state == "ready"


async def test_a_command_for_nobody_is_ignored(bench: Bench, tmp_path: Path) -> None:
    runner = await bench.started(worker(bench, tmp_path))
    obey([WorkerCommand("p9", "restart", "c1")], [runner], deque(maxlen=10))
    assert statuses([runner])[0].state == "ready"
