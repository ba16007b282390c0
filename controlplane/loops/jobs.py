"""Runs jobs: a few at a time, each with an end, each ended with the control plane."""

from __future__ import annotations

import asyncio
from functools import partial

import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.cache.agents import NodeError
from controlplane.cache.context import JobContext, OperationError
from controlplane.cache.keeping import PinKeeper
from controlplane.cache.operations import OPERATIONS
from controlplane.cache.weights import WeightsWatch
from controlplane.errors import ApiError
from controlplane.jobs.schemas import JobState
from controlplane.jobs.service import MAX_ATTEMPTS, LiveJob, Outcome
from controlplane.plane import Plane

MAX_RUNNING = 4
JOB_SECONDS = 1800.0
STOP_SECONDS = 5.0
"""What a running job gets to tidy up when the control plane ends; it is queued again after."""
RECORD_PAUSES_SECONDS = (0.2, 1.0, 5.0, 15.0)

log = structlog.get_logger("controlplane")


class JobRunner:
    """`step` starts what waits; `close` ends what runs. Jobs that did not end stay queued."""

    def __init__(self, plane: Plane, job_seconds: float = JOB_SECONDS) -> None:
        self._plane = plane
        self._job_seconds = job_seconds
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._weights = WeightsWatch(plane)
        self._pins = PinKeeper(plane)

    async def step(self) -> None:
        """Start jobs as far as there is room; queue what replaced weights and restarts ask for."""
        await self._weights.look()
        await self._pins.look()
        for job in self._plane.jobs.queued():
            if len(self._tasks) >= MAX_RUNNING:
                return
            if job.attempts >= MAX_ATTEMPTS:
                await self._give_up(job)
                continue
            async with self._plane.db.write() as tx:
                await self._plane.jobs.start(tx, job)
                # with the commit: this pass may be cut short before it would come to it
                tx.after_commit(partial(self._launch, job))

    async def wait(self) -> None:
        """Until nothing runs; for tests."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=STOP_SECONDS)

    def _launch(self, job: LiveJob) -> None:
        task = asyncio.create_task(self._run(job), name=f"job-{job.id}")
        self._tasks[job.id] = task
        task.add_done_callback(partial(self._ended, job.id))

    async def _run(self, job: LiveJob) -> None:
        context = self._context(job)
        state: JobState = "cancelled"
        outcome = Outcome()
        if not job.cancelling:  # while the database was being told
            task = asyncio.current_task()
            assert task is not None
            job.stop = task.cancel
            state, outcome = await self._outcome(job, context)
        job.stop = None  # too late: what it did is being recorded
        if job.cancelling:
            state = "cancelled"
            outcome = Outcome({"nodes": context.by_node}, context.undo)
        await self._record(job, state, outcome)
        log.info("job ended", job=job.id, kind=job.kind, state=state, error=outcome.error)

    async def _record(self, job: LiveJob, state: JobState, outcome: Outcome) -> None:
        """Write a job's end down; a database that is away for a moment is waited for."""
        for pause in RECORD_PAUSES_SECONDS:
            try:
                await self._plane.jobs.finish(self._plane.db, job, state, outcome)
            except (SQLAlchemyError, TimeoutError, OSError) as error:
                log.warning("job not recorded yet", job=job.id, error=str(error)[:300])
                await asyncio.sleep(pause)
            else:
                return
        await self._plane.jobs.finish(self._plane.db, job, state, outcome)

    async def _outcome(self, job: LiveJob, context: JobContext) -> tuple[JobState, Outcome]:
        try:
            async with asyncio.timeout(self._job_seconds):
                outcome = await OPERATIONS[job.kind](context)
        except asyncio.CancelledError:
            if not job.cancelling:
                raise  # the control plane ends: the job is queued again when it is back
            return "cancelled", Outcome()
        except TimeoutError:
            problem = f"It ran for {self._job_seconds:.0f} s and was ended. Select less at once."
        except ApiError as error:
            problem = f"{error} {error.problem.way_out or ''}".strip()
        except (NodeError, OperationError) as error:
            problem = str(error)
        except Exception as error:
            log.exception("job failed", job=job.id, kind=job.kind)
            problem = f"An error inside the control plane ({type(error).__name__}: {error})."
        else:
            return ("failed" if outcome.error else "done"), outcome
        return "failed", Outcome({"nodes": context.by_node}, context.undo, problem)

    def _context(self, job: LiveJob) -> JobContext:
        tell = partial(self._plane.jobs.note_progress, job)
        return JobContext(
            job.id, job.spec, job.attempts, self._plane.nodes, self._plane.clock, tell
        )

    async def _give_up(self, job: LiveJob) -> None:
        problem = (
            f"The control plane ended {job.attempts} times while it ran. "
            "What it had done by then stays done; start it again if it is still wanted."
        )
        await self._plane.jobs.finish(self._plane.db, job, "failed", Outcome(error=problem))

    def _ended(self, job_id: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(job_id, None)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            log.error("job not recorded", job=job_id, error=f"{type(error).__name__}: {error}")
            job = self._plane.jobs.live.get(job_id)
            if job is not None:
                job.state = "queued"  # the database was away: the next attempt records it
