"""Operators' jobs: the list, what runs now, one in full."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo

from console.viewmodel import numbers
from console.viewmodel.filters import FieldKind
from console.viewmodel.pool import bar
from console.viewmodel.table import Column, Fact, Row, Table, Text, Tone, cell, clean
from controlplane.jobs.schemas import LIVE_STATES, Job, JobProgress

COLUMNS = (
    Column("id", "JOB", 5, "right"),
    Column("kind", "KIND", 9),
    Column("target", "TARGET", 20, grow=True),
    Column("state", "STATE", 10),
    Column("bar", "", 10, drop=2),
    Column("done", "DONE", 16, "right"),
    Column("at", "CREATED", 11, drop=1),
    Column("by", "BY", 10, drop=3),
    Column("note", "NOTE", 24, grow=True),
)
FIELDS: dict[str, FieldKind] = {"kind": "text", "state": "text", "target": "text", "by": "text"}
EMPTY = "No job has been asked for. Pin, prefetch and purge begin in Cache, tenants."
_TONES: dict[str, Tone] = {
    "queued": "muted", "running": "accent", "done": "well", "failed": "critical", "cancelled": "warn",
}  # fmt: skip


def jobs(rows: Sequence[Job], *, now: float, tz: tzinfo) -> Table:
    """Newest first. `now` in seconds since the epoch."""
    ordered = sorted(rows, key=lambda job: -job.id)
    return Table(COLUMNS, tuple(_row(job, now, tz) for job in ordered), EMPTY)


def is_live(job: Job) -> bool:
    """Waits or runs."""
    return job.state in LIVE_STATES


def _row(job: Job, now: float, tz: tzinfo) -> Row:
    state = "cancelling" if job.cancelling and is_live(job) else job.state
    cells = (
        Text(str(job.id)),
        Text(job.kind),
        cell(job.target),
        Text(state, _TONES[job.state]),
        Text(bar(share(job), 10) if job.state == "running" else ""),
        Text(done_text(job.progress) if job.state != "queued" else numbers.NO_TRAFFIC),
        Text(numbers.stamp(job.created_at, now, tz)),
        cell("itself" if job.automatic else job.author),
        cell(_note(job), "critical" if job.error else "muted"),
    )
    facts: dict[str, Fact] = {
        "id": float(job.id), "kind": job.kind, "state": job.state, "target": job.target, "by": job.author,
    }  # fmt: skip
    return Row(str(job.id), cells, facts, f"job/{job.id}")


def share(job: Job) -> float | None:
    """Of what is to be done; None while that is unknown."""
    progress = job.progress
    if progress.total is None:
        return None
    return 1.0 if not progress.total else min(1.0, progress.done / progress.total)


def done_text(progress: JobProgress) -> str:
    """`120 / 400 blocks`."""
    total = "" if progress.total is None else f" / {numbers.count(progress.total)}"
    return f"{numbers.count(progress.done)}{total} {progress.unit}"


def _note(job: Job) -> str:
    return job.error or job.progress.note or job.reason


def running(rows: Sequence[Job]) -> Text:
    """`1 running: purge acme 62.0 %`, for the head of the cache screens."""
    live = sorted((job for job in rows if is_live(job)), key=lambda job: job.id)
    if not live:
        return Text("none", "muted")
    first = next((job for job in live if job.state == "running"), live[0])
    much = "" if share(first) is None else f" {numbers.percent(share(first))}"
    more = f", {len(live) - 1} more" if len(live) > 1 else ""
    return cell(f"{first.state}: {first.kind} {first.target}{much}{more}", "accent")


def describe(job: Job, *, now: float, tz: tzinfo) -> tuple[Row, ...]:
    """All fields of one job, as name and value."""
    finished = numbers.NO_TRAFFIC if is_live(job) else numbers.stamp(job.finished_at, now, tz)
    undo = "no"
    if job.undo.job_id is not None:
        undo = f"taken back by job {job.undo.job_id}"
    elif job.undo.possible:
        undo = f"yes: {job.undo.how}" if job.undo.how else "yes"
    elif job.undo.how:
        undo = f"no: {job.undo.how}"
    facts = [
        ("state", job.state + (", being cancelled" if job.cancelling and is_live(job) else "")),
        ("target", job.target),
        ("done", done_text(job.progress)),
        ("created", f"{numbers.stamp(job.created_at, now, tz)} by {job.author}"),
        ("started", numbers.NO_TRAFFIC if job.started_at is None else numbers.stamp(job.started_at, now, tz)),
        ("finished", finished),
        ("reason", job.reason or numbers.NO_TRAFFIC),
        ("undo", undo),
        ("error", job.error or "none"),
        *((f"result {name}", str(value)) for name, value in list(job.result.items())[:20]),
        *((f"asked {name}", str(value)) for name, value in list(job.spec.items())[:20]),
    ]  # fmt: skip
    tones: dict[str, Tone] = {"error": "critical" if job.error else "muted"}
    return tuple(
        Row(name, (Text(name, "muted"), Text(clean(value), tones.get(name, "plain"))))
        for name, value in facts
    )
