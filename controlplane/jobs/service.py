"""Jobs: queued by operators (or by the control plane itself), run one after another by the loop.

    queued -> running -> done | failed | cancelled          queued -> cancelled

Memory is the truth for what has not ended; the database has every job. Progress lives in memory
alone: a job that a restart of the control plane interrupted is queued again and begins anew, which
every kind of job stands, at most `MAX_ATTEMPTS` times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit.service import AuditTrail
from controlplane.clock import Clock
from controlplane.db.session import Database, Transaction
from controlplane.errors import ConflictError, NotFoundError, UnavailableError
from controlplane.events.bus import EventBus
from controlplane.jobs import repository
from controlplane.jobs.schemas import Job, JobKind, JobProgress, JobState, JobUndo
from controlplane.jobs.tables import JobRow

MAX_LIVE = 200
KEEP_JOBS = 1000
MAX_ATTEMPTS = 3
TELL_SECONDS = 0.25
"""How often a running job's progress is told to who listens."""
MAX_ERROR_CHARS = 2000


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a job is made of. `target` is how people name what it acts on."""

    kind: JobKind
    target: str
    spec: dict[str, object]
    author: str
    reason: str = ""
    request_id: str = ""
    automatic: bool = False
    undoes: int | None = None  # the job that this one takes back


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job. `undo`: kind and spec of the job that takes it back, or why none does."""

    result: dict[str, object] = field(default_factory=dict)
    undo: dict[str, object] = field(default_factory=dict)
    error: str = ""


@dataclass(slots=True, eq=False)
class LiveJob:
    """A job that has not ended. `stop` ends its task, once it has one."""

    id: int
    kind: JobKind
    target: str
    spec: dict[str, object]
    author: str
    reason: str
    request_id: str
    automatic: bool
    created_at: datetime
    state: JobState = "queued"
    attempts: int = 0
    started_at: datetime | None = None
    progress: JobProgress = field(default_factory=JobProgress)
    cancelling: bool = False
    stop: Callable[[], object] | None = None
    told_at: float = float("-inf")

    def to_schema(self) -> Job:
        return Job(
            id=self.id,
            kind=self.kind,
            target=self.target,
            spec=self.spec,
            state=self.state,
            progress=self.progress,
            attempts=self.attempts,
            automatic=self.automatic,
            cancelling=self.cancelling,
            created_at=self.created_at,
            started_at=self.started_at,
            author=self.author,
            reason=self.reason,
        )


class JobStore:
    """Every job. `live` are those that have not ended, oldest first."""

    def __init__(self, bus: EventBus, clock: Clock, audit: AuditTrail) -> None:
        self._bus = bus
        self._clock = clock
        self._audit = audit
        self.live: dict[int, LiveJob] = {}

    # --- reading ----------------------------------------------------------------------------

    async def load(self, session: AsyncSession) -> None:
        """Queue again what was under way when the control plane ended."""
        for row in await repository.live(session):
            job = _live_of(row)
            self.live[job.id] = job

    async def find(self, session: AsyncSession, job_id: int) -> Job:
        job = self.live.get(job_id)
        if job is not None:
            return job.to_schema()
        row = await repository.get(session, job_id)
        if row is None:
            raise NotFoundError(
                f"No job {job_id}.",
                field="job_id",
                value=job_id,
                way_out=f"perilune jobs list shows them; the newest {KEEP_JOBS} are kept.",
            )
        return to_schema(row)

    async def newest(
        self,
        session: AsyncSession,
        *,
        limit: int,
        before_id: int | None = None,
        state: JobState | None = None,
        kind: JobKind | None = None,
    ) -> list[Job]:
        states = [state] if state else []
        rows = await repository.newest(
            session, limit=limit, before_id=before_id, states=states, kind=kind
        )
        return [
            self.live[row.id].to_schema() if row.id in self.live else to_schema(row) for row in rows
        ]

    def queued(self) -> list[LiveJob]:
        """Those that may be started, oldest first."""
        waiting = [job for job in self.live.values() if job.state == "queued"]
        return [job for job in waiting if not job.cancelling]

    def num_running(self) -> int:
        return sum(job.state == "running" for job in self.live.values())

    # --- writing ----------------------------------------------------------------------------

    async def create(self, tx: Transaction, new: NewJob) -> Job:
        """Queue a job, with its audit row; it may run once the transaction is committed."""
        if len(self.live) >= MAX_LIVE:
            raise UnavailableError(
                f"{len(self.live)} jobs wait or run, which is the limit.",
                field="kind",
                value=new.kind,
                way_out="Wait for some, or cancel them: perilune jobs cancel ID.",
            )
        row = await repository.add(tx.session, _row_of(new, self._clock.now()))
        job = _live_of(row)
        await self._audit.record(
            tx,
            actor=new.author,
            request_id=new.request_id,
            verb=f"cache.{new.kind}",
            target=new.target,
            after={"job": job.id, **new.spec},
            reason=new.reason,
        )
        if new.undoes is not None:
            await self._note_undone(tx, new.undoes, job.id)

        def queue() -> None:
            self.live[job.id] = job
            self._bus.publish("job", job.to_schema())

        tx.after_commit(queue)
        return job.to_schema()

    async def cancel(
        self, tx: Transaction, job_id: int, *, actor: str, request_id: str, reason: str
    ) -> Job:
        """End a job that waits, or have a running one stop: what it has done stays done."""
        job = self.live.get(job_id)
        if job is None:
            ended = await self.find(tx.session, job_id)
            raise ConflictError(
                f"Job {job_id} is {ended.state} already.",
                field="job_id",
                value=job_id,
                way_out="perilune jobs undo takes a job back where that can be done.",
            )
        if job.cancelling:
            return job.to_schema()
        await self._audit.record(
            tx,
            actor=actor,
            request_id=request_id,
            verb="job.cancel",
            target=f"job/{job_id}",
            before={"state": job.state, "kind": job.kind, "target": job.target},
            reason=reason,
        )
        if job.state == "queued":
            job.cancelling = True  # at once: the loop must not start it while we write
            tx.after_failure(lambda: setattr(job, "cancelling", False))
            return await self._end(tx, job, "cancelled", Outcome(), audited=True)
        tx.after_commit(lambda: self._stop(job))
        return job.to_schema().model_copy(update={"cancelling": True})

    async def start(self, tx: Transaction, job: LiveJob) -> None:
        """It runs from now on: also while the database is still being told."""
        job.state, job.attempts = "running", job.attempts + 1
        job.started_at = job.started_at or self._clock.now()
        tx.after_failure(lambda: setattr(job, "state", "queued"))
        values = {"state": "running", "attempts": job.attempts, "started_at": job.started_at}
        await repository.change(tx.session, job.id, values)
        tx.after_commit(lambda: self._bus.publish("job", job.to_schema()))

    def note_progress(self, job: LiveJob, done: int, total: int | None, note: str) -> None:
        """Where a running job is. Told to listeners now and then, kept for those who ask."""
        job.progress = job.progress.model_copy(update={"done": done, "total": total, "note": note})
        now = self._clock.monotonic()
        if now - job.told_at >= TELL_SECONDS:
            job.told_at = now
            self._bus.publish_passing("job", job.to_schema())

    async def finish(self, db: Database, job: LiveJob, state: JobState, outcome: Outcome) -> None:
        async with db.write() as tx:
            await self._end(tx, job, state, outcome)

    async def prune(self, session: AsyncSession) -> None:
        await repository.prune(session, KEEP_JOBS)

    # --- inside -----------------------------------------------------------------------------

    async def _end(
        self,
        tx: Transaction,
        job: LiveJob,
        state: JobState,
        outcome: Outcome,
        *,
        audited: bool = False,
    ) -> Job:
        error = outcome.error[:MAX_ERROR_CHARS]
        values = {
            "state": state,
            "finished_at": self._clock.now(),
            "done": job.progress.done,
            "total": job.progress.total,
            "error": error,
            "result": outcome.result,
            "undo": outcome.undo,
        }
        await repository.change(tx.session, job.id, values)
        if not audited:
            await self._audit.record(
                tx,
                actor=job.author,
                request_id=job.request_id,
                verb=f"job.{state}",
                target=f"job/{job.id}",
                before={"kind": job.kind, "target": job.target},
                after={"error": error} if error else outcome.result,
                reason=job.reason,
            )
        ended = job.to_schema().model_copy(
            update={
                "state": state,
                "finished_at": values["finished_at"],
                "error": error,
                "result": outcome.result,
                "undo": _undo_of(outcome.undo),
                "cancelling": False,
            }
        )

        def forget() -> None:
            self.live.pop(job.id, None)
            self._bus.publish("job", ended)

        tx.after_commit(forget)
        return ended

    def _stop(self, job: LiveJob) -> None:
        job.cancelling = True
        if job.stop is not None:
            job.stop()
        self._bus.publish("job", job.to_schema())

    async def _note_undone(self, tx: Transaction, job_id: int, by: int) -> None:
        row = await repository.get(tx.session, job_id)
        if row is not None:
            await repository.change(tx.session, job_id, {"undo": {**row.undo, "job_id": by}})


def to_schema(row: JobRow) -> Job:
    return Job(
        id=row.id,
        kind=cast("JobKind", row.kind),
        target=row.target,
        spec=row.spec,
        state=cast("JobState", row.state),
        progress=JobProgress(done=row.done, total=row.total),
        attempts=row.attempts,
        automatic=row.automatic,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        author=row.author,
        reason=row.reason,
        error=row.error,
        result=row.result,
        undo=_undo_of(row.undo),
    )


def _undo_of(undo: dict[str, Any]) -> JobUndo:
    job_id = undo.get("job_id")
    possible = "kind" in undo and job_id is None
    how = f"was taken back by job {job_id}" if job_id is not None else str(undo.get("how", ""))
    return JobUndo(possible=possible, how=how, job_id=job_id)


def _row_of(new: NewJob, now: datetime) -> JobRow:
    return JobRow(
        kind=new.kind,
        target=new.target,
        spec=new.spec,
        state="queued",
        attempts=0,
        automatic=new.automatic,
        done=0,
        total=None,
        created_at=now,
        started_at=None,
        finished_at=None,
        author=new.author,
        reason=new.reason,
        request_id=new.request_id,
        error="",
        result={},
        undo={},
    )


def _live_of(row: JobRow) -> LiveJob:
    """As it waits: also one that was running in an earlier life of the control plane."""
    return LiveJob(
        id=row.id,
        kind=cast("JobKind", row.kind),
        target=row.target,
        spec=row.spec,
        author=row.author,
        reason=row.reason,
        request_id=row.request_id,
        automatic=row.automatic,
        created_at=row.created_at,
        attempts=row.attempts,
        started_at=row.started_at,
    )
