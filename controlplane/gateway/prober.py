"""Asks workers whether they answer: those that are ejected, and those that have fallen silent.

A stopped process still takes connections, so nothing tells a hung worker from a slow one but that
its health route says nothing either. Then its legs fail at once, to be tried elsewhere.
"""

import asyncio
from time import monotonic

import structlog

from controlplane.gateway.cluster import Cluster
from controlplane.gateway.upstream import Upstream, UpstreamError
from controlplane.gateway.worker_state import WorkerState

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
        self._unanswered: dict[Upstream, int] = {}

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
        workers = self._cluster.workers
        suspects = [
            worker
            for worker in (*workers.values(), *self._cluster.retired)
            if worker.upstream.is_silent(now, SILENT_SECONDS)
            or (worker.row.id in ejected and workers.get(worker.row.id) is worker)
        ]
        for upstream in self._unanswered.keys() - {worker.upstream for worker in suspects}:
            del self._unanswered[upstream]
        await asyncio.gather(*(self._probe(worker) for worker in suspects))

    async def _probe(self, worker: WorkerState) -> None:
        error = ""
        try:
            status = await _ask(worker)
            if status >= 500:
                error = f"its health route answered {status}"
        except UpstreamError as failure:
            error = f"its health route gave no answer: {failure}"
        now, upstream = monotonic(), worker.upstream
        if self._is_listed(worker):
            self._cluster.health.probed(worker.row.id, now, answers=not error)
        if not error:
            self._unanswered.pop(upstream, None)
            return
        count = self._unanswered[upstream] = self._unanswered.get(upstream, 0) + 1
        if count >= PROBES_TO_GIVE_UP:  # and each time after that: a trial may have gone there
            self._give_up(worker, error, now)

    def _give_up(self, worker: WorkerState, error: str, now: float) -> None:
        """Its legs fail, each in its own walk; those before their first byte go elsewhere."""
        name = worker.row.id
        if self._is_listed(worker):
            self._cluster.health.failed(name, now, unreachable=True, error=error)
        count = worker.upstream.fail_waiting(UpstreamError("hung", f"it hangs: {error}"))
        if count or self._unanswered[worker.upstream] == PROBES_TO_GIVE_UP:
            log.warning("worker_hangs", worker=name, error=error, legs_ended=count)

    def _is_listed(self, worker: WorkerState) -> bool:
        """Not one whose name another engine has now."""
        return self._cluster.workers.get(worker.row.id) is worker


async def _ask(worker: WorkerState) -> int:
    upstream = worker.upstream
    request = b"GET %b/health HTTP/1.1\r\nhost: %b\r\n\r\n" % (
        upstream.base_path,
        upstream.host_header,
    )
    reply = await upstream.send(request, head_seconds=PROBE_SECONDS)
    await reply.whole(_MAX_BODY, PROBE_SECONDS, PROBE_SECONDS)
    return reply.status
