"""Jobs, and what an operator may do: each act with its consequences, as the terminal shows them."""

from __future__ import annotations

from typing import Any

from console import calls
from console.viewmodel import acts, jobs
from console.viewmodel.acts import Act
from controlplane.calls import Call
from controlplane.client_http import ClientError
from controlplane.doctor import calls as doctor_calls
from controlplane.doctor.schemas import DoctorRun
from controlplane.gateways import calls as running_calls
from controlplane.gateways.running_schemas import RequestCancel, RunningList
from controlplane.jobs.schemas import Job
from controlplane.schema_base import Problem

from .base import Context, Page, filtered
from .pool import MAX_JOBS, read_pool
from .requests import MAX_RUNNING
from .transfers import probe_of


async def jobs_page(context: Context) -> Page:
    """Newest first, with progress; live ones can be cancelled, some of the others taken back."""
    found = await context.client.send(calls.jobs(MAX_JOBS))
    table = jobs.jobs(found.items, now=context.now, tz=context.viewer.tz)
    shown = filtered(table, context.viewer, jobs.FIELDS)
    buttons = {str(job.id): _buttons(job) for job in found.items if _buttons(job)}
    data = {
        "rows": shown.table,
        "count": shown.count,
        "filter_error": shown.error,
        "acts": buttons,
    }
    return Page("jobs.html", "Jobs", "jobs", [("Jobs", "")], data, has_acts=True)


async def job_page(context: Context, job_id: str) -> Page:
    """One job in full."""
    job = await _job(context, job_id)
    data = {
        "job": job,
        "facts": jobs.describe(job, now=context.now, tz=context.viewer.tz),
        "share": jobs.share(job),
        "buttons": _buttons(job),
    }
    title = f"{job.id} {job.kind}"
    crumbs = [("Jobs", "/jobs"), (title, "")]
    return Page("job.html", f"Job {title}", "jobs", crumbs, data, has_acts=True)


async def act_of(context: Context, kind: str, target: str) -> dict[str, object]:
    """What it would do, and the request that does it. Writes nothing; ClientError where it cannot."""
    found = await _act(context, kind, target)
    if isinstance(found, str):
        raise _refused(found, kind, target)
    call = _call_of(found)
    return {
        "title": found.title,
        "button": found.button,
        "leave": found.leave,
        "lines": [{"text": line.text, "tone": line.tone} for line in found.lines],
        "typed": found.typed,
        "method": call.method,
        "path": call.path,
        "body": None if call.body is None else call.body.model_dump(mode="json", exclude_none=True),
    }


def _call_of(act: Act) -> Call[Any]:
    if isinstance(act.body, DoctorRun):
        return doctor_calls.run(act.body)
    if isinstance(act.body, RequestCancel):
        return running_calls.cancel(act.request_id, act.body)
    return calls.job_act(act, "") if act.job_id is not None else calls.cache_act(act)


async def _act(context: Context, kind: str, target: str) -> Act | str:
    if kind == "doctor":
        return await probe_of(context, target)
    if kind == "cancel_request":
        found: RunningList = await context.client.send(running_calls.running(MAX_RUNNING))
        return acts.cancel_running(found, target)
    if kind == "cancel":
        job = await _job(context, target)
        return acts.cancel(job) or f"Job {job.id} is {job.state}: there is nothing to cancel."
    if kind == "undo":
        job = await _job(context, target)
        return acts.undo(job) or f"Job {job.id} cannot be taken back: {job.undo.how or 'nothing of it is left'}."  # fmt: skip
    if kind == "unpin":
        pins = await context.client.send(calls.pins())
        name = target.rpartition("/")[0]
        return acts.unpin([pin for pin in pins.items if pin.name == name]) or "This pin is gone."
    report = await read_pool(context)
    if target.split("/", maxsplit=1)[0] in ("tenant", "namespace"):
        return acts.of_group(kind, target, report)
    return acts.purge_node(target.rpartition("/")[0], report) or f"No node {target} is known."


async def _job(context: Context, job_id: str) -> Job:
    found: Job = await context.client.send(calls.job(job_id))
    return found


def _buttons(job: Job) -> tuple[tuple[str, str], ...]:
    if jobs.is_live(job):
        return () if job.cancelling else (("cancel", "Cancel"),)
    return (("undo", "Undo"),) if job.undo.possible and job.undo.job_id is None else ()


def _refused(text: str, field: str, value: str, status: int = 409) -> ClientError:
    return ClientError(Problem(title=text, status=status, detail=text, field=field, value=value))
