"""Runs the doctor: one run at a time, kept in memory until the next."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from controlplane.cache.agents import Target, targets
from controlplane.clock import Clock
from controlplane.db.session import Database
from controlplane.decisions.repository import Filters
from controlplane.decisions.schemas import Decision
from controlplane.decisions.service import DecisionLog
from controlplane.doctor.asking import Answer, Asker
from controlplane.doctor.bound import bound_of, check_geometry, kv_bytes_per_token, read_geometry
from controlplane.doctor.plan import nodes_of, pairs_of, shown
from controlplane.doctor.schemas import DoctorReport, DoctorRun
from controlplane.doctor.verdicts import (
    bound_schema,
    counts_of,
    node_order,
    node_schema,
    not_probed,
    pair_order,
    pair_schema,
)
from controlplane.errors import ConflictError
from controlplane.models.service import ModelRegistry
from controlplane.nodes.service import NodeRegistry
from workers.core.disaggregation import Bound, Geometry

RUN_SECONDS = 300.0
SAMPLES = 200
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that can begin."""

    body: DoctorRun
    asked: list[Target]
    pairs: list[tuple[str, str]]
    left_out: int
    geometry: Geometry | None
    decisions: list[Decision]


@dataclass(slots=True)
class DoctorService:
    """`plan` then `begin` start a run, `report` is the last one; `close` ends what is under way."""

    clock: Clock
    db: Database
    nodes: NodeRegistry
    models: ModelRegistry
    decisions: DecisionLog
    logs: str
    report: DoctorReport = field(default_factory=DoctorReport)
    _task: asyncio.Task[None] | None = None

    def check_idle(self) -> None:
        """ConflictError: a run is under way."""
        if self._task is not None and not self._task.done():
            raise ConflictError(
                f"Run {self.report.number} of the doctor is under way "
                f"({self.report.done} of {self.report.total}).",
                way_out="Read it with GET /api/v1/doctor; it ends by itself.",
            )

    async def plan(self, body: DoctorRun) -> Plan:
        """ConflictError; NotFoundError: a node that is unknown; InvalidError: no geometry."""
        self.check_idle()
        named = [body.node] if body.node else body.pair.split(":") if body.pair else []
        for node in named:
            self.nodes.find(node)
        known = [target.node for target in targets(self.nodes, None)]
        wanted = nodes_of(body, sorted({*known, *named}))
        asked = [target for node in wanted for target in targets(self.nodes, node)]
        pairs, left_out = pairs_of(body, [target.node for target in asked])
        geometry = None
        if body.flops is not None:
            paths = [model.path for model in self.models.list(())]
            geometry = check_geometry(body.flops, await asyncio.to_thread(read_geometry, paths))
        async with self.db.read() as session:
            page = await self.decisions.list(session, Filters(), SAMPLES, None)
        return Plan(body, asked, pairs, left_out, geometry, list(page.items))

    def begin(self, plan: Plan, actor: str) -> DoctorReport:
        """Start what was planned; the report tells how it goes on. ConflictError."""
        self.check_idle()
        self.report = DoctorReport(
            number=self.report.number + 1,
            state="running",
            actor=actor,
            started_at=self.clock.now(),
            total=len(plan.asked) + len(plan.pairs),
            pairs_left_out=plan.left_out,
        )
        self._task = asyncio.get_running_loop().create_task(self._run(plan))
        return self.report

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # --- a run ------------------------------------------------------------------------------

    async def _run(self, plan: Plan) -> None:
        change: dict[str, Any] = {"state": "failed", "error": "The control plane stopped."}
        try:
            async with asyncio.timeout(RUN_SECONDS):
                await self._look(plan)
            change = {"state": "done"}
        except TimeoutError:
            change["error"] = f"It took more than {RUN_SECONDS:.0f} s: what is here is not all."
        except Exception as error:
            _log.exception("doctor_failed")
            change["error"] = f"{type(error).__name__}: {error}"
        finally:
            self._update(**change, finished_at=self.clock.now())

    async def _look(self, plan: Plan) -> None:
        asker = Asker(self.clock, plan.body, self.logs)
        answers: dict[str, Answer] = {}
        async with asyncio.TaskGroup() as group:
            for target in plan.asked:
                group.create_task(self._ask(asker, plan.body, target, answers))
        specs = [i.spec for a in answers.values() if a.facts for i in a.facts.namespaces]
        kv_bytes = kv_bytes_per_token(specs)
        bound = bound_of(plan.body, kv_bytes, plan.decisions, plan.geometry)
        self._update(bound=bound_schema(bound))
        by_node = {target.node: target for target in plan.asked}
        async with asyncio.TaskGroup() as group:
            for source, destination in plan.pairs:
                ends = answers[source], answers[destination]
                group.create_task(self._pair(asker, ends, by_node[destination], bound))

    async def _ask(
        self, asker: Asker, body: DoctorRun, target: Target, answers: dict[str, Answer]
    ) -> None:
        answer = answers[target.node] = await asker.facts(target)
        nodes = [*self.report.nodes, node_schema(answer)] if shown(body, target.node) else None
        changes = {} if nodes is None else {"nodes": sorted(nodes, key=node_order)}
        self._update(done=self.report.done + 1, **changes)

    async def _pair(
        self, asker: Asker, ends: tuple[Answer, Answer], target: Target, bound: Bound | None
    ) -> None:
        source, destination = ends
        if source.facts is None or destination.facts is None:
            pair = not_probed(source, destination)
        else:
            report = await asker.probe(source.facts, target)
            pair = pair_schema(report, source.facts, destination.facts, bound)
        pairs = sorted([*self.report.pairs, pair], key=pair_order)
        self._update(done=self.report.done + 1, pairs=pairs)

    def _update(self, **changes: Any) -> None:
        report = self.report.model_copy(update=changes)
        self.report = report.model_copy(update={"counts": counts_of(report)})
