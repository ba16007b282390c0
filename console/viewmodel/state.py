"""What a console knows: a snapshot read by REST, kept up by the event stream. All bounded.

`now` is the caller's monotonic clock; it only ever measures how old things are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pydantic import ValidationError

from console.viewmodel.history import History
from console.viewmodel.numbers import known
from controlplane.audit.schemas import AuditRow
from controlplane.cache.schemas import CachePinList
from controlplane.decisions.schemas import Decision
from controlplane.doctor.schemas import DoctorReport
from controlplane.events.schemas import Event
from controlplane.fleet.schemas import Worker
from controlplane.gateways.running_schemas import RunningList
from controlplane.gateways.schemas import Gateway
from controlplane.jobs.schemas import Job
from controlplane.ledger.schemas import LedgerList, LedgerSummary
from controlplane.nodes.pool_schemas import PoolReport
from controlplane.nodes.schemas import Node
from controlplane.policies.schemas import PolicyRevision
from controlplane.stats.schemas import Matrix, Overview, SeriesReply
from controlplane.transfers.schemas import NodeTransferList

_Key = TypeVar("_Key", str, int)
_Value = TypeVar("_Value")

MAX_DECISIONS = 500
MAX_AUDIT = 500
MAX_NODES = 1024
MAX_WORKERS = 4096
MAX_GATEWAYS = 64
MAX_POLICIES = 256
MAX_JOBS = 200

Part = Literal[
    "reset", "overview", "history", "nodes", "workers", "gateways", "policies", "decisions", "audit",
    "matrix", "pool", "jobs", "doctor", "running", "ledger",
]  # fmt: skip
PARTS: frozenset[Part] = frozenset(
    (
        "overview",
        "history",
        "nodes",
        "workers",
        "gateways",
        "policies",
        "decisions",
        "audit",
        "matrix",
        "pool",
        "jobs",
        "doctor",
        "running",
        "ledger",
    )
)


@dataclass(frozen=True, slots=True)
class PairTransfers:
    """The report on the pair of nodes that a screen shows."""

    source: str
    target: str
    found: NodeTransferList


@dataclass(frozen=True, slots=True)
class OpenedRequest:
    """A request that was read by its id; `found` is None where there is no record of it."""

    request_id: str
    found: Decision | None


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """The newest entries of the ledger, and what the last hour comes to."""

    page: LedgerList
    summary: LedgerSummary


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Frozen view of the state. Decisions and audit rows run from oldest to newest.

    `received` is when the newest sample came, `row_received` when each row did (`node:n1`).
    """

    overview: Overview | None = None
    nodes: tuple[Node, ...] = ()
    workers: tuple[Worker, ...] = ()
    gateways: tuple[Gateway, ...] = ()
    policies: tuple[PolicyRevision, ...] = ()
    decisions: tuple[Decision, ...] = ()
    audit: tuple[AuditRow, ...] = ()
    matrix: Matrix | None = None
    received: float | None = None
    row_received: Mapping[str, float] = field(default_factory=dict)
    server_time: float | None = None  # seconds since the epoch, of the newest tick
    bad_events: int = 0
    pool: PoolReport | None = None
    pins: CachePinList | None = None
    jobs: tuple[Job, ...] = ()  # by id, the oldest first
    doctor: DoctorReport | None = None
    pair: PairTransfers | None = None
    alarms: NodeTransferList | None = None  # its alarms alone
    running: RunningList | None = None
    ledger: LedgerReport | None = None
    opened: OpenedRequest | None = None

    @property
    def emulated(self) -> bool:
        """Any number here may come from the emulated engine."""
        shown = self.overview is not None and self.overview.emulated
        return shown or any(worker.engine == "emulated" for worker in self.workers)

    def decision(self, request_id: str) -> Decision | None:
        """A request of the last ones, or the one that was read by its id."""
        for decision in reversed(self.decisions):
            if decision.request_id == request_id:
                return decision
        opened = self.opened
        return opened.found if opened is not None and opened.request_id == request_id else None

    def is_unrecorded(self, request_id: str) -> bool:
        """It was asked for, and there is no record of it."""
        opened = self.opened
        return opened is not None and opened.request_id == request_id and opened.found is None

    def transfers_of(self, source: str, target: str) -> NodeTransferList | None:
        """The report on a pair, if it is the one that was read."""
        pair = self.pair
        wanted = pair is not None and (pair.source, pair.target) == (source, target)
        return pair.found if pair is not None and wanted else None

    def server_now(self, now: float) -> float | None:
        """The control plane's clock at `now`."""
        if self.server_time is None or self.received is None:
            return None
        return self.server_time + max(0.0, now - self.received)

    def age_of(self, key: str, age_seconds: float, now: float) -> float:
        """A row's age: as the server gave it, plus the time since it came."""
        received = self.row_received.get(key)
        return age_seconds if received is None else age_seconds + max(0.0, now - received)


class ConsoleState:
    """Mutable state behind a front end. One owner, one thread; readers take `snapshot()`."""

    def __init__(self) -> None:
        self.history = History()
        self._overview: Overview | None = None
        self._nodes: OrderedDict[str, Node] = OrderedDict()
        self._workers: OrderedDict[str, Worker] = OrderedDict()
        self._gateways: OrderedDict[str, Gateway] = OrderedDict()
        self._policies: OrderedDict[str, PolicyRevision] = OrderedDict()
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._audit: OrderedDict[int, AuditRow] = OrderedDict()
        self._matrix: Matrix | None = None
        self._pool: PoolReport | None = None
        self._pins: CachePinList | None = None
        self._jobs: OrderedDict[int, Job] = OrderedDict()
        self._doctor: DoctorReport | None = None
        self._pair: PairTransfers | None = None
        self._alarms: NodeTransferList | None = None
        self._running: RunningList | None = None
        self._ledger: LedgerReport | None = None
        self._opened: OpenedRequest | None = None
        self._received: float | None = None
        self._row_received: dict[str, float] = {}
        self._server_time: float | None = None
        self._bad_events = 0
        self._handlers: dict[str, Callable[[dict[str, object], float], Iterable[Part]]] = {
            "reset": lambda data, now: ("reset",),
            "tick": self._tick,
            "node": self._node,
            "node_removed": self._node_removed,
            "worker": self._worker,
            "gateway": self._gateway,
            "policy": self._policy,
            "decision": self._decision,
            "audit": self._audit_row,
            "job": self._job,
        }

    def load(
        self,
        now: float,
        *,
        overview: Overview | None = None,
        nodes: Iterable[Node] | None = None,
        workers: Iterable[Worker] | None = None,
        gateways: Iterable[Gateway] | None = None,
        policies: Iterable[PolicyRevision] | None = None,
        decisions: Iterable[Decision] | None = None,
        audit: Iterable[AuditRow] | None = None,
        matrix: Matrix | None = None,
        series: SeriesReply | None = None,
        pool: PoolReport | None = None,
        pins: CachePinList | None = None,
        jobs: Iterable[Job] | None = None,
        doctor: DoctorReport | None = None,
        pair: PairTransfers | None = None,
        alarms: NodeTransferList | None = None,
        running: RunningList | None = None,
        ledger: LedgerReport | None = None,
        opened: OpenedRequest | None = None,
    ) -> None:
        """Take what REST says; a list given replaces the old one, None leaves it."""
        if overview is not None:
            self._take_overview(overview, now)
        if matrix is not None:
            self._matrix = matrix
        if series is not None:
            self.history.load(series)
        self._doctor, self._pair = doctor or self._doctor, pair or self._pair
        self._alarms = alarms or self._alarms
        self._running, self._ledger = running or self._running, ledger or self._ledger
        self._opened = opened or self._opened
        self._load_pool(pool, pins, jobs)
        self._load_cluster(now, nodes, workers, gateways)
        if policies is not None:
            self._policies = OrderedDict((_policy_key(p), p) for p in policies if p.active)
        if decisions is not None:
            rows = sorted(decisions, key=lambda row: (row.at, row.request_id))
            self._decisions = OrderedDict((row.request_id, row) for row in rows[-MAX_DECISIONS:])
        if audit is not None:
            kept = sorted(audit, key=lambda row: row.id)[-MAX_AUDIT:]
            self._audit = OrderedDict((row.id, row) for row in kept)

    def _load_pool(
        self, pool: PoolReport | None, pins: CachePinList | None, jobs: Iterable[Job] | None
    ) -> None:
        self._pool = pool or self._pool
        self._pins = pins or self._pins
        if jobs is not None:
            kept = sorted(jobs, key=lambda job: job.id)[-MAX_JOBS:]
            self._jobs = OrderedDict((job.id, job) for job in kept)

    def _load_cluster(
        self,
        now: float,
        nodes: Iterable[Node] | None,
        workers: Iterable[Worker] | None,
        gateways: Iterable[Gateway] | None,
    ) -> None:
        if nodes is not None:
            self._nodes.clear()
            self._forget_ages("node:")
            for node in nodes:
                self._put_node(node, now)
        if workers is not None:
            self._workers.clear()
            self._forget_ages("worker:")
            for worker in workers:
                self._put_worker(worker, now)
        if gateways is not None:
            self._gateways = OrderedDict((gateway.id, gateway) for gateway in gateways)

    @property
    def doctor(self) -> DoctorReport | None:
        """The report that was read last."""
        return self._doctor

    def apply(self, event: Event, now: float) -> frozenset[Part]:
        """Take one event and say which parts changed. `reset` means: read everything again.

        An event that does not fit its schema is counted in `bad_events`, never raised.
        """
        try:
            return frozenset(self._handlers[event.type](event.data, now))
        except (ValidationError, KeyError, TypeError, ValueError):
            self._bad_events += 1
            return frozenset()

    def snapshot(self) -> Snapshot:
        """Everything, frozen."""
        return Snapshot(
            self._overview,
            tuple(sorted(self._nodes.values(), key=lambda row: row.id)),
            tuple(sorted(self._workers.values(), key=lambda row: (_role_order(row), row.id))),
            tuple(sorted(self._gateways.values(), key=lambda row: row.id)),
            tuple(sorted(self._policies.values(), key=lambda row: (row.kind, row.scope))),
            tuple(self._decisions.values()),
            tuple(self._audit.values()),
            self._matrix,
            self._received,
            dict(self._row_received),
            self._server_time,
            self._bad_events,
            self._pool,
            self._pins,
            tuple(self._jobs[name] for name in sorted(self._jobs)),
            self._doctor,
            self._pair,
            self._alarms,
            self._running,
            self._ledger,
            self._opened,
        )

    def _take_overview(self, overview: Overview, now: float) -> None:
        self._overview = overview
        self._received = now
        self._server_time = overview.at

    def _tick(self, data: dict[str, object], now: float) -> Iterable[Part]:
        overview = Overview.model_validate(data["overview"])
        at = data.get("at", overview.at)
        points = data.get("points") or {}
        self._take_overview(overview, now)
        if isinstance(at, (int, float)) and isinstance(points, dict):
            self.history.add(float(at), _points(points))
        return ("overview", "history")

    def _node(self, data: dict[str, object], now: float) -> Iterable[Part]:
        self._put_node(Node.model_validate(data), now)
        return ("nodes",)

    def _node_removed(self, data: dict[str, object], now: float) -> Iterable[Part]:
        name = str(data["id"])
        self._nodes.pop(name, None)
        self._row_received.pop(f"node:{name}", None)
        self.history.forget(f"node:{name}")
        for worker in [w.id for w in self._workers.values() if w.node_id == name]:
            del self._workers[worker]
            self._row_received.pop(f"worker:{worker}", None)
        return ("nodes", "workers")

    def _worker(self, data: dict[str, object], now: float) -> Iterable[Part]:
        self._put_worker(Worker.model_validate(data), now)
        return ("workers",)

    def _gateway(self, data: dict[str, object], now: float) -> Iterable[Part]:
        gateway = Gateway.model_validate(data)
        self._gateways[gateway.id] = gateway
        _trim(self._gateways, MAX_GATEWAYS)
        return ("gateways",)

    def _policy(self, data: dict[str, object], now: float) -> Iterable[Part]:
        policy = PolicyRevision.model_validate(data)
        if policy.active:
            self._policies[_policy_key(policy)] = policy
            _trim(self._policies, MAX_POLICIES)
        return ("policies",)

    def _decision(self, data: dict[str, object], now: float) -> Iterable[Part]:
        decision = Decision.model_validate(data)
        self._decisions[decision.request_id] = decision  # a later record wins and keeps its place
        _trim(self._decisions, MAX_DECISIONS)
        return ("decisions",)

    def _audit_row(self, data: dict[str, object], now: float) -> Iterable[Part]:
        row = AuditRow.model_validate(data)
        self._audit[row.id] = row
        _trim(self._audit, MAX_AUDIT)
        return ("audit",)

    def _job(self, data: dict[str, object], now: float) -> Iterable[Part]:
        job = Job.model_validate(data)
        self._jobs[job.id] = job
        while len(self._jobs) > MAX_JOBS:
            del self._jobs[min(self._jobs)]
        return ("jobs",)

    def _forget_ages(self, prefix: str) -> None:
        self._row_received = {
            key: at for key, at in self._row_received.items() if not key.startswith(prefix)
        }

    def _put_node(self, node: Node, now: float) -> None:
        self._nodes[node.id] = node
        self._row_received[f"node:{node.id}"] = now
        for name in _trim(self._nodes, MAX_NODES):
            self._row_received.pop(f"node:{name}", None)

    def _put_worker(self, worker: Worker, now: float) -> None:
        self._workers[worker.id] = worker
        self._row_received[f"worker:{worker.id}"] = now
        for name in _trim(self._workers, MAX_WORKERS):
            self._row_received.pop(f"worker:{name}", None)


def _points(points: dict[object, object]) -> dict[str, dict[str, float | None]]:
    return {
        str(source): {
            str(metric): known(value) if isinstance(value, (int, float)) else None
            for metric, value in metrics.items()
        }
        for source, metrics in points.items()
        if isinstance(metrics, dict)
    }


def _trim(rows: OrderedDict[_Key, _Value], limit: int) -> list[_Key]:
    gone: list[_Key] = []
    while len(rows) > limit:
        gone.append(rows.popitem(last=False)[0])
    return gone


def _policy_key(policy: PolicyRevision) -> str:
    return f"{policy.kind}/{policy.scope}"


def _role_order(worker: Worker) -> int:
    return {"prefill": 0, "both": 1, "decode": 2}[worker.role]
