"""Pins outlive their node's agent: it forgets them when it restarts, its blocks may be there again.

What is pinned follows from the jobs: the newest that pinned or unpinned a name on a node says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from controlplane.jobs.schemas import LIVE_STATES, Job
from controlplane.jobs.service import KEEP_JOBS, NewJob
from controlplane.plane import Plane

AUTHOR = "control-plane"
PinOnNode = tuple[str, str]


@dataclass(frozen=True, slots=True)
class LostPin:
    """A pin that its node's agent has forgotten, and what makes it again."""

    name: str
    node: str
    target: str
    spec: dict[str, Any]


def lost_pins(
    newest_first: Iterable[Job], joined_at: Mapping[str, datetime], now: datetime
) -> list[LostPin]:
    """Pins made before their node's agent began its present life, and not ended since. Pure."""
    settled: set[PinOnNode] = set()
    found: list[LostPin] = []
    for job in newest_first:
        if job.kind == "unpin":
            settled |= _unpinned(job)
        if job.kind != "pin":
            continue
        for pin in _pinned(job, joined_at):
            key = (pin.name, pin.node)
            fresh, settled = key not in settled, settled | {key}
            if fresh and _is_lost(job, pin, joined_at) and not _has_ended(pin.spec, now):
                found.append(pin)
    return found


class PinKeeper:
    """Looks at jobs when a node's agent has begun a new life, and queues what pins again."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._joined: dict[str, datetime] = {}

    async def look(self) -> None:
        """Cheap while no agent restarts: it reads memory."""
        # before it holds anything there is nothing to pin
        ready = [
            n
            for n in self._plane.nodes.list()
            if n.state in ("ready", "not_ready") and n.used_blocks
        ]
        joined = {node.id: node.joined_at for node in ready}
        if not joined.items() - self._joined.items():
            return
        async with self._plane.db.read() as session:
            jobs = await self._plane.jobs.newest(session, limit=KEEP_JOBS)
        for lost in lost_pins(jobs, joined, self._plane.clock.now()):
            await self._queue(lost)
        self._joined = {**self._joined, **joined}

    async def _queue(self, lost: LostPin) -> None:
        new = NewJob(
            "pin",
            lost.target,
            lost.spec,
            author=AUTHOR,
            reason=f"Automatic: the agent of {lost.node} restarted and forgot the pin {lost.name}",
            automatic=True,
        )
        async with self._plane.db.write() as tx:
            await self._plane.jobs.create(tx, new)


def _unpinned(job: Job) -> set[PinOnNode]:
    return {
        (str(name), node)
        for node, figures in _by_node(job).items()
        for name in figures.get("pins", ())
    }


def _pinned(job: Job, nodes: Iterable[str]) -> list[LostPin]:
    """What a job pinned, or is about to, or could not, by node."""
    if "restore" in job.spec:
        entries: list[dict[str, Any]] = job.spec["restore"]  # type: ignore[assignment]
        return [
            LostPin(str(e["name"]), str(e["node"]), job.target, {"restore": [e]}) for e in entries
        ]
    node = job.spec.get("node")
    where = [str(node)] if node else list(_by_node(job) or nodes)
    name = str(job.spec.get("name", ""))
    return [LostPin(name, where_, job.target, {**job.spec, "node": where_}) for where_ in where]


def _is_lost(job: Job, pin: LostPin, joined_at: Mapping[str, datetime]) -> bool:
    """Not so while it is being made, nor where it never was."""
    if job.state in LIVE_STATES or job.finished_at is None or pin.node not in _by_node(job):
        return False
    joined = joined_at.get(pin.node)
    return job.state == "done" and joined is not None and joined > job.finished_at


def _has_ended(spec: dict[str, Any], now: datetime) -> bool:
    expires = [entry.get("expires_at") for entry in spec.get("restore", [spec])]
    return any(_moment(at) <= now.timestamp() for at in expires if at is not None)


def _moment(at: object) -> float:
    return datetime.fromisoformat(at).timestamp() if isinstance(at, str) else float(str(at))


def _by_node(job: Job) -> dict[str, dict[str, Any]]:
    nodes = job.result.get("nodes")
    return nodes if isinstance(nodes, dict) else {}
