"""Asking agents for the doctor: bounded calls, a few at a time; what fails is part of the answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from controlplane.cache.agents import NodeError, Target, open_agent
from controlplane.clock import Clock
from controlplane.doctor.schemas import DoctorRun
from workers.core.doctor_messages import GetNodeFacts, GetProbe, NodeFacts, Probe, ProbeReport
from workers.core.transfer_messages import HolderRef

AT_ONCE = 4
POLL_SECONDS = 0.2
PROBE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A node's facts, or why there are none. The offset is the node's clock less ours."""

    node: str
    facts: NodeFacts | None
    error: str = ""
    clock_offset: float | None = None
    clock_error: float = 0.0


@dataclass(slots=True)
class Asker:
    """Asks all, `AT_ONCE` at a time, and one node for one probe at a time."""

    clock: Clock
    body: DoctorRun
    logs: str
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    _nodes: dict[str, asyncio.Lock] = field(default_factory=dict)

    async def facts(self, target: Target) -> Answer:
        async with self._slots:
            try:
                async with open_agent(target) as agent:
                    # The first call makes the connection: the clock is compared by the second.
                    await agent.call(GetNodeFacts(self.logs), NodeFacts)
                    sent, wall = self.clock.monotonic(), self.clock.now().timestamp()
                    found = await agent.call(GetNodeFacts(self.logs), NodeFacts)
                    took = self.clock.monotonic() - sent
            except NodeError as error:
                return Answer(target.node, None, str(error))
        offset = found.host.wall_seconds - wall - took / 2
        return Answer(target.node, found, "", offset, took / 2)

    async def probe(self, source: NodeFacts, destination: Target) -> ProbeReport:
        """Have `destination` pull from `source`."""
        holder = HolderRef(source.node_id, source.endpoint, source.incarnation)
        failed = ProbeReport("", "done", source.node_id, destination.node)
        if not source.endpoint:
            text = f"{source.node_id} has no TCP endpoint for other nodes (its agent's --tcp)"
            return _with_error(failed, text)
        lock = self._nodes.setdefault(destination.node, asyncio.Lock())
        async with lock, self._slots:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    return await self._follow(holder, destination)
            except TimeoutError:
                return _with_error(failed, f"the probe took more than {PROBE_SECONDS:.0f} s")
            except NodeError as error:
                return _with_error(failed, str(error))

    async def _follow(self, holder: HolderRef, destination: Target) -> ProbeReport:
        async with open_agent(destination) as agent:
            report = await agent.call(Probe(holder, max_bytes=self.body.max_bytes), ProbeReport)
            while report.state == "running":
                await asyncio.sleep(POLL_SECONDS)
                report = await agent.call(GetProbe(report.probe_id), ProbeReport)
            return report


def _with_error(report: ProbeReport, error: str) -> ProbeReport:
    return ProbeReport(report.probe_id, "done", report.source, report.destination, error=error)
