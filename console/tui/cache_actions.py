"""Acting keys of the cache, jobs, requests and doctor screens: a panel first, then one request to the
control plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from console import calls
from console.tui.pages.act import ActPage
from console.tui.pages.base import Location
from console.viewmodel import acts, numbers
from console.viewmodel.acts import Act
from controlplane.client_http import ClientError, UnreachableError
from controlplane.doctor import calls as doctor_calls
from controlplane.doctor.schemas import DoctorRun
from controlplane.gateways import calls as running_calls
from controlplane.gateways.running_schemas import RequestCancel
from controlplane.jobs.schemas import Job

if TYPE_CHECKING:
    from console.tui.app import ConsoleApp

NAMES = frozenset(
    {
        "edit_cache",
        "pin",
        "prefetch",
        "purge",
        "cancel_job",
        "undo_job",
        "run_doctor",
        "cancel_request",
    }
)
CACHE_POLICY = "cache/default"
_UNKNOWN = {"doctor": ("run has begun", "0"), "cancel_request": ("request was cancelled", "6")}
"""What is not known without an answer, and the key that shows it."""


async def ask(app: ConsoleApp, action: str) -> None:
    """Open the draft of the cache policy, or the panel of an action on the row at the cursor."""
    if action == "edit_cache":
        await app.go(Location("draft", CACHE_POLICY))
        return
    found = app.page.act_on(action)
    if isinstance(found, str):
        app.notice(found)
        return
    await app.go(Location("act", found.kind))
    panel = app.page
    if isinstance(panel, ActPage):
        panel.ask(found, app.clock())
    app.redraw()


async def send(app: ConsoleApp, act: Act, reason: str) -> None:
    """Do it. A refusal is said where one came from; nothing was done then."""
    try:
        if isinstance(act.body, DoctorRun):
            await _run_doctor(app, act.body.model_copy(update={"reason": reason}))
            return
        if isinstance(act.body, RequestCancel):
            await _cancel_request(app, act, act.body.model_copy(update={"reason": reason}))
            return
        if act.body is not None:
            job = (await app.source.send(calls.cache_act(acts.with_reason(act, reason)))).job
        else:
            job = await app.source.send(calls.job_act(act, reason))
    except ClientError as error:
        await app.back()
        app.notice(_refused(act, error))
        return
    known = [other for other in app.state.snapshot().jobs if other.id != job.id]
    app.state.load(app.clock(), jobs=[*known, job])
    await app.back()
    app.notice(_words(act, job))


async def _run_doctor(app: ConsoleApp, body: DoctorRun) -> None:
    """The report that has begun is what the screen shows next. Raises `ClientError`."""
    report = await app.source.send(doctor_calls.run(body))
    app.state.load(app.clock(), doctor=report)
    app.feed.follow_doctor()
    await app.back()
    awaited = f"{report.total} answer{'' if report.total == 1 else 's'}"
    app.notice(f"Run {report.number} of the doctor has begun: {awaited} are awaited. 0 shows it.")


async def _cancel_request(app: ConsoleApp, act: Act, body: RequestCancel) -> None:
    """It leaves the list once its gateway is asked again. Raises `ClientError`."""
    reply = await app.source.send(running_calls.cancel(act.request_id, body))
    await app.back()
    name = numbers.short_id(act.request_id)
    state = reply.cancelled.state.replace("_", " ")
    app.notice(f"Cancelled request {name}, which was {state}. Its record says who and why.")
    app.feed.hurry("requests")


def _words(act: Act, job: Job) -> str:
    if act.kind == "cancel":
        return f"Job {job.id} is {'being cancelled' if job.cancelling else job.state}. 8 shows it."
    return f"Job {job.id} {job.kind} {job.target} is {job.state}. 8 shows how far it is."


def _refused(act: Act, error: ClientError) -> str:
    if isinstance(error, UnreachableError):
        what, key = _UNKNOWN.get(act.kind, ("job was taken", "8"))
        return f"No answer: whether the {what} is unknown. {key} shows it once LIVE again."
    if error.status in (401, 403):
        return "Acting needs the operator's token: $PERILUNE_TOKEN, or the token file of the data folder."
    return f"Nothing was done: {error}"
