"""Asks workers whether they answer: those that are ejected, and those that have fallen silent.

A stopped process still takes connections, so nothing tells a hung worker from a slow one but that
its health route says nothing either. Then its legs fail at once, to be tried elsewhere.
"""

import asyncio
from time import monotonic

import structlog

from controlplane.gateway.cluster import Cluster, WorkerState
from controlplane.gateway.upstream import UpstreamError

log = structlog.get_logger(__name__)

EVERY_SECONDS = 1.0
SILENT_SECONDS = 3.0
"""A worker that has sent nothing for so long, though something is waited for, is asked."""
PROBE_SECONDS = 3.0
PROBES_TO_GIVE_UP = 3
"""In a row without an answer: about ten seconds in all."""
_MAX_BODY = 64 * 1024


class Prober:
    """`run` until cancelled."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._unanswered: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            try:
                await self._round()
            except Exception:  # a bug here must not end the probing for good
                log.exception("probing_failed")

    async def _round(self) -> None:
        now = monotonic()
        ejected = set(self._cluster.health.ejected())
        suspects = [
            worker
            for name, worker in self._cluster.workers.items()
            if name in ejected or worker.upstream.is_silent(now, SILENT_SECONDS)
        ]
        for name in self._unanswered.keys() - {worker.row.id for worker in suspects}:
            del self._unanswered[name]
        await asyncio.gather(*(self._probe(worker) for worker in suspects))

    async def _probe(self, worker: WorkerState) -> None:
        name, error = worker.row.id, ""
        try:
            status = await _ask(worker)
            if status >= 500:
                error = f"its health route answered {status}"
        except UpstreamError as failure:
            error = f"its health route gave no answer: {failure}"
        now = monotonic()
        self._cluster.health.probed(name, now, answers=not error)
        if not error:
            self._unanswered.pop(name, None)
            return
        count = self._unanswered[name] = self._unanswered.get(name, 0) + 1
        if count >= PROBES_TO_GIVE_UP:  # and each time after that: a trial may have gone there
            self._give_up(worker, error, now)

    def _give_up(self, worker: WorkerState, error: str, now: float) -> None:
        """Its legs fail, each in its own walk; those before their first byte go elsewhere."""
        name = worker.row.id
        self._cluster.health.failed(name, now, unreachable=True, error=error)
        count = worker.upstream.fail_waiting(UpstreamError("hung", f"it hangs: {error}"))
        if count or self._unanswered[name] == PROBES_TO_GIVE_UP:
            log.warning("worker_hangs", worker=name, error=error, legs_ended=count)


async def _ask(worker: WorkerState) -> int:
    upstream = worker.upstream
    request = b"GET %b/health HTTP/1.1\r\nhost: %b\r\n\r\n" % (
        upstream.base_path,
        upstream.host_header,
    )
    reply = await upstream.send(request, head_seconds=PROBE_SECONDS)
    await reply.whole(_MAX_BODY, PROBE_SECONDS, PROBE_SECONDS)
    return reply.status
