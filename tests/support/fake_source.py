"""A control plane without a network: answers from a world of recorded objects, streams what tests emit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from pool_objects import NOW, make_job, make_pool

from controlplane.audit.schemas import AuditList
from controlplane.cache.schemas import CacheJob
from controlplane.calls import Call
from controlplane.client_http import ClientError, StreamState, UnreachableError
from controlplane.decisions.schemas import Decision, DecisionList
from controlplane.doctor.schemas import DoctorReport
from controlplane.events.schemas import Event
from controlplane.fleet.schemas import Worker
from controlplane.gateways.running_schemas import RequestCancelled
from controlplane.gateways.schemas import Gateway
from controlplane.jobs.schemas import JobList
from controlplane.nodes.schemas import Node
from controlplane.policies.schemas import (
    PolicyList,
    PolicyPut,
    PolicyPutReply,
    PolicyRevision,
)
from controlplane.schema_base import Problem
from controlplane.stats.schemas import Matrix, Overview, SeriesReply


class FakeSource:
    """Answers from a `World`; `emit` streams events, `down` refuses everything."""

    url = "http://127.0.0.1:7700"

    def __init__(self, world: Any) -> None:
        self.world = world
        self.queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self.down = False
        self.refuse: ClientError | None = None
        self.puts: list[tuple[str, str, PolicyPut, int | None]] = []
        self.num_events = 0
        self.older: list[Decision] = []
        self.sent: list[Call[Any]] = []

    def emit(self, kind: str, data: dict[str, object]) -> None:
        self.num_events += 1
        self.queue.put_nowait(Event(id=f"b-{self.num_events}", type=kind, data=data))  # type: ignore[arg-type]  # tests name them

    def tick(self, at: float = NOW, **changes: object) -> None:
        overview = self.world.overview.model_copy(update={"at": at, **changes})
        self.emit("tick", {"at": at, "overview": overview.model_dump(mode="json"), "points": {}})

    def _check(self) -> None:
        if self.down:
            raise UnreachableError(self.url, ConnectionRefusedError("connection refused"))

    async def events(
        self,
        last_event_id: str | None = None,
        on_state: Callable[[StreamState], None] | None = None,
    ) -> AsyncIterator[Event]:
        tell = on_state or (lambda state: None)
        while True:
            if self.down:
                tell(
                    StreamState(connected=False, error="connection refused", retry_in_seconds=0.05)
                )
                await asyncio.sleep(0.05)
                continue
            tell(StreamState(connected=True))
            while (event := await self.queue.get()) is not None:
                yield event

    async def send(self, call: Call[Any]) -> Any:
        """The calls of the cache and jobs screens, by path."""
        self._check()
        if call.method == "GET":
            return {
                "/api/v1/cache/pool": self.world.pool or make_pool(0, groups=[], namespaces=[], curve=[], measured_hit_rate=None, claims_checked=None),
                "/api/v1/cache/pins": self.world.pins,
                "/api/v1/jobs": JobList(items=self.world.jobs),
                "/api/v1/doctor": self.world.doctor,
                "/api/v1/requests": self.world.running,
                "/api/v1/ledger": self.world.ledger,
                "/api/v1/ledger/summary": self.world.summary,
                "/api/v1/transfers/nodes": self.world.transfers,
            }[call.path]  # fmt: skip
        if self.refuse is not None:
            raise self.refuse
        self.sent.append(call)
        if call.path == "/api/v1/doctor":
            self.world.doctor = DoctorReport(
                number=4, state="running", actor="ana", started_at=self.world.at, total=16
            )
            return self.world.doctor
        if call.path.startswith("/api/v1/requests/"):
            item = self.world.running.items[0]
            return RequestCancelled(cancelled=item)
        if call.path.startswith("/api/v1/cache/"):
            kind = call.path.rpartition("/")[2]
            return CacheJob(
                job=make_job(
                    200 + len(self.sent), kind=kind, state="queued", target="acme", progress={}
                )
            )
        state = {"cancelling": True} if call.method == "DELETE" else {"state": "queued"}
        return make_job(118, **state)

    async def overview(self, window: float = 900) -> Overview:
        self._check()
        return self.world.overview

    async def nodes(self) -> list[Node]:
        self._check()
        return self.world.nodes

    async def workers(self) -> list[Worker]:
        self._check()
        return self.world.workers

    async def gateways(self) -> list[Gateway]:
        self._check()
        return self.world.gateways

    async def policies(self) -> list[PolicyRevision]:
        self._check()
        return self.world.policies

    async def policy(self, kind: str, scope: str) -> PolicyRevision:
        self._check()
        return next(p for p in self.world.policies if (p.kind, p.scope) == (kind, scope))

    async def policy_revisions(
        self, kind: str, scope: str, limit: int | None = None, cursor: str | None = None
    ) -> PolicyList:
        self._check()
        return PolicyList(
            items=[p for p in self.world.policies if (p.kind, p.scope) == (kind, scope)]
        )

    async def put_policy(
        self, kind: str, scope: str, body: PolicyPut, if_match: int | None = None
    ) -> PolicyPutReply:
        self._check()
        if self.refuse is not None:
            raise self.refuse
        self.puts.append((kind, scope, body, if_match))
        old = await self.policy(kind, scope)
        new = old.model_copy(
            update={"revision": old.revision + 1, "spec": body.spec, "reason": body.reason}
        )
        self.world.policies = [new if p is old else p for p in self.world.policies]
        return PolicyPutReply(active=new, acknowledged_gateways=["gw-1"])

    async def decisions(self, *, limit: int | None = None) -> DecisionList:
        self._check()
        return DecisionList(items=list(reversed(self.world.decisions)))

    async def decision(self, request_id: str) -> Decision:
        self._check()
        for decision in (*self.world.decisions, *self.older):
            if decision.request_id == request_id:
                return decision
        raise ClientError(Problem(title="not found", status=404, detail=f"no {request_id}"))

    async def audit(self, *, limit: int | None = None) -> AuditList:
        self._check()
        return AuditList(items=list(reversed(self.world.audit)))

    async def matrix(self, window: float = 300) -> Matrix:
        self._check()
        return self.world.matrix

    async def series(
        self,
        metric: str,
        source: str = "cluster",
        window: float = 900,
        step: float = 10,
        end: float | None = None,
    ) -> SeriesReply:
        self._check()
        return self.world.series(self.world.overview.at)
