"""Workers as they are now: what the supervisors report, what operators asked for, what is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock
from controlplane.core.handshake import HandshakeName
from controlplane.core.health import DataPathState
from controlplane.db.session import Transaction
from controlplane.errors import ConflictError, NotFoundError, UnavailableError
from controlplane.fleet import repository
from controlplane.fleet.schemas import Worker, WorkerRegistration, WorkerState
from controlplane.nodes.schemas import NodeState
from controlplane.nodes.state import READY_SECONDS
from workers.core.stats_messages import NamespaceInfo, WorkerStatus

EXTERNAL_NODE = "external"
MAX_WORKERS = 4000
MAX_DEAD_WORKERS = 200
MISSING_SECONDS = 10.0
"""How long a worker may be absent from its supervisor's list (an agent restarts) before it is
taken for stopped."""
DEAD_STATES = frozenset({"stopped", "lost"})
FOLLOWS_NODE = frozenset({"requested", "launching", "loading", "ready", "draining"})


@dataclass(slots=True)
class LiveWorker:
    """`seen` (monotonic) is when it was last in a supervisor's list, or registered."""

    node_id: str
    status: WorkerStatus
    seen: float
    seen_at: datetime
    external: bool = False
    drained: bool = False
    namespace: str | None = None
    block_tokens: int | None = None
    max_concurrent_requests: int = 16
    handshake: HandshakeName = "perilune"
    bootstrap: str = ""
    engine_id: str = ""
    dirty: bool = True

    def facts(self) -> dict[str, object]:
        return {
            "status": msgspec.to_builtins(self.status),
            "namespace": self.namespace,
            "block_tokens": self.block_tokens,
            "max_concurrent_requests": self.max_concurrent_requests,
            "handshake": self.handshake,
            "bootstrap": self.bootstrap,
            "engine_id": self.engine_id,
        }


class WorkerRegistry:
    """Every worker, by id. `node_state` and `load` answer for other parts of the plane."""

    def __init__(
        self,
        clock: Clock,
        node_state: Callable[[str], NodeState | None],
        load: Callable[[str], tuple[int, int] | None],
        data_path: Callable[[str], tuple[DataPathState, str] | None] = lambda _: None,
    ) -> None:
        self._data_path = data_path
        self._clock = clock
        self._node_state = node_state
        self._load = load
        self._workers: dict[str, LiveWorker] = {}
        self._removed: set[str] = set()
        self._heard: dict[str, float] = {}  # node -> its last report

    async def load_all(self, session: AsyncSession) -> None:
        mono = self._clock.monotonic()
        for row in await repository.everything(session):
            facts: dict[str, Any] = dict(row.facts)
            status = msgspec.convert(facts["status"], WorkerStatus)
            self._workers[row.id] = LiveWorker(
                node_id=row.node_id,
                status=status,
                seen=mono,  # its supervisor has had no chance to speak to us yet
                seen_at=row.seen_at,
                external=row.external,
                drained=row.drained,
                namespace=facts.get("namespace"),
                block_tokens=facts.get("block_tokens"),
                max_concurrent_requests=int(facts.get("max_concurrent_requests", 16)),
                handshake=facts.get("handshake", "perilune"),
                bootstrap=facts.get("bootstrap", ""),
                engine_id=facts.get("engine_id", ""),
                dirty=False,
            )

    def report(
        self, node_id: str, statuses: list[WorkerStatus], namespaces: list[NamespaceInfo]
    ) -> set[str]:
        """Take a node's whole list; returns the ids it concerns."""
        mono, now = self._clock.monotonic(), self._clock.now()
        self._node_heard(node_id, mono)
        space_of = {w: info for info in namespaces for w in info.workers}
        for status in statuses:
            worker = self._known(node_id, status)
            if worker is None:
                continue
            if worker.status != status and _lasting(worker.status) != _lasting(status):
                worker.dirty = True
            worker.status, worker.seen, worker.seen_at = status, mono, now
            info = space_of.get(status.worker_id)
            if info is not None and worker.namespace != info.digest.hex():
                worker.namespace, worker.dirty = info.digest.hex(), True
                worker.block_tokens = info.spec.block_tokens
        return {w.status.worker_id for w in self._workers.values() if w.node_id == node_id}

    def _node_heard(self, node_id: str, mono: float) -> None:
        """A new agent does not know its node's workers until their supervisor lists them again:
        after a silence they have as long for that as ever."""
        silent = mono - self._heard.get(node_id, mono)
        self._heard[node_id] = mono
        if silent > READY_SECONDS:
            for worker_id in self.ids_of_node(node_id):
                self._workers[worker_id].seen = mono

    def _known(self, node_id: str, status: WorkerStatus) -> LiveWorker | None:
        worker = self._workers.get(status.worker_id)
        if worker is None:
            if len(self._workers) >= MAX_WORKERS:
                return None
            worker = LiveWorker(node_id, status, 0.0, self._clock.now())
            self._workers[status.worker_id] = worker
            self._removed.discard(status.worker_id)
        elif worker.node_id != node_id:
            if worker.external or self._node_state(worker.node_id) == "ready":
                return None  # the name is taken by a living one: ids are unique in a cluster
            worker.node_id, worker.dirty = node_id, True
        return worker

    def register(self, body: WorkerRegistration) -> tuple[bool, LiveWorker]:
        """An engine that Perilune did not start; (changed, worker). The same again is no change."""
        old = self._workers.get(body.id)
        if old is not None and not old.external:
            raise ConflictError(
                f"Worker {body.id} is run by node {old.node_id}.",
                field="id",
                value=body.id,
                way_out="Register the engine under another id.",
            )
        if old is None and len(self._workers) >= MAX_WORKERS:
            raise UnavailableError(
                f"{MAX_WORKERS} workers are known, which is the limit.",
                field="id",
                value=body.id,
                way_out="Remove workers that are gone.",
            )
        status = WorkerStatus(
            worker_id=body.id,
            role=body.role,
            model=body.model,
            url=body.url,
            state="ready",
            engine=body.engine,
            started_at=old.status.started_at if old else self._clock.now().timestamp(),
        )
        worker = LiveWorker(
            node_id=body.node_id,
            status=status,
            seen=self._clock.monotonic(),
            seen_at=self._clock.now(),
            external=True,
            drained=old.drained if old else False,
            max_concurrent_requests=body.max_concurrent_requests,
            handshake=body.handshake,
            bootstrap=body.bootstrap,
            engine_id=body.engine_id,
        )
        changed = old is None or (old.node_id, old.facts()) != (worker.node_id, worker.facts())
        return changed, worker

    def put(self, worker: LiveWorker) -> None:
        self._workers[worker.status.worker_id] = worker
        self._removed.discard(worker.status.worker_id)

    def find(self, worker_id: str) -> LiveWorker:
        worker = self._workers.get(worker_id)
        if worker is None:
            known = ", ".join(sorted(self._workers)[:10]) or "none"
            raise NotFoundError(
                f"No worker {worker_id!r}.",
                field="worker_id",
                value=worker_id,
                way_out=f"Known workers: {known}.",
            )
        return worker

    def removable(self, worker_id: str) -> LiveWorker:
        worker = self.find(worker_id)
        state = self.state_of(worker)
        if not worker.external and state not in DEAD_STATES:
            raise ConflictError(
                f"Worker {worker_id} is {state}: its node would report it again at once.",
                field="worker_id",
                value=worker_id,
                way_out="Stop it where it was started.",
            )
        return worker

    def drop(self, worker_ids: Iterable[str]) -> None:
        for worker_id in worker_ids:
            self._workers.pop(worker_id, None)
            self._removed.add(worker_id)

    def ids_of_node(self, node_id: str) -> list[str]:
        return [i for i, w in self._workers.items() if w.node_id == node_id and not w.external]

    def state_of(self, worker: LiveWorker) -> WorkerState:
        state: WorkerState = worker.status.state
        if not worker.external:
            node = self._node_state(worker.node_id)
            if node in {None, "lost"} and state in FOLLOWS_NODE:
                return "lost"
            if self._clock.monotonic() - worker.seen > MISSING_SECONDS and node == "ready":
                return "stopped"
        return "draining" if worker.drained and state == "ready" else state

    def sweep(self) -> list[str]:
        """Drop dead workers beyond the bound, longest gone first; returns their ids."""
        nodes = {worker.node_id for worker in self._workers.values()}
        self._heard = {node: at for node, at in self._heard.items() if node in nodes}
        dead = sorted(
            (worker.seen, worker_id)
            for worker_id, worker in self._workers.items()
            if not worker.external and self.state_of(worker) in DEAD_STATES
        )
        dropped = [worker_id for _, worker_id in dead[: max(0, len(dead) - MAX_DEAD_WORKERS)]]
        self.drop(dropped)
        return dropped

    def list(self, worker_ids: Iterable[str] | None = None) -> list[Worker]:
        wanted = sorted(self._workers if worker_ids is None else worker_ids)
        return [self.to_schema(self._workers[i]) for i in wanted if i in self._workers]

    def to_schema(self, worker: LiveWorker) -> Worker:
        status = worker.status
        load = self._load(status.worker_id)
        data_path = self._data_path(status.worker_id)
        started = status.started_at
        return Worker(
            id=status.worker_id,
            node_id=worker.node_id,
            role=status.role,
            model=status.model,
            url=status.url,
            state=self.state_of(worker),
            engine=status.engine,
            pid=status.pid or None,
            restarts=status.restarts,
            started_at=datetime.fromtimestamp(started, UTC) if started > 0 else None,
            last_error=status.last_error,
            log_file=status.log_file,
            namespace=worker.namespace,
            block_tokens=worker.block_tokens,
            rss_bytes=status.rss_bytes or None,
            running=load[0] if load else None,
            waiting=load[1] if load else None,
            max_concurrent_requests=worker.max_concurrent_requests,
            handshake=worker.handshake,
            bootstrap=worker.bootstrap,
            engine_id=worker.engine_id,
            data_path=data_path[0] if data_path else None,
            data_path_note=data_path[1] if data_path else "",
            age_seconds=round(max(0.0, self._clock.monotonic() - worker.seen), 3),
        )

    async def save(self, tx: Transaction) -> None:
        """Write what changed since the last time."""
        removed, self._removed = self._removed, set()
        due = [worker for worker in self._workers.values() if worker.dirty]
        rows = [row_of(worker) for worker in due]
        for worker in due:
            worker.dirty = False

        def restore() -> None:
            self._removed |= removed
            for worker in due:
                worker.dirty = True

        tx.after_failure(restore)
        if removed:
            await repository.remove(tx.session, removed)
        if rows:
            await repository.save(tx.session, rows)


def row_of(worker: LiveWorker) -> Mapping[str, Any]:
    return {
        "id": worker.status.worker_id,
        "node_id": worker.node_id,
        "external": worker.external,
        "drained": worker.drained,
        "seen_at": worker.seen_at,
        "facts": worker.facts(),
    }


def _lasting(status: WorkerStatus) -> WorkerStatus:
    """Without what changes at every look: such a change alone is not worth a write."""
    return msgspec.structs.replace(status, rss_bytes=0)
