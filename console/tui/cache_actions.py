"""Acting keys of the cache and jobs screens: a panel first, then one request to the control plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from console import calls
from console.tui.pages.act import ActPage
from console.tui.pages.base import Location
from console.viewmodel import acts
from console.viewmodel.acts import Act
from controlplane.client_http import ClientError, UnreachableError
from controlplane.jobs.schemas import Job

if TYPE_CHECKING:
    from console.tui.app import ConsoleApp

NAMES = frozenset({"edit_cache", "pin", "prefetch", "purge", "cancel_job", "undo_job"})
CACHE_POLICY = "cache/default"


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
        if act.body is not None:
            job = (await app.source.send(calls.cache_act(acts.with_reason(act, reason)))).job
        else:
            job = await app.source.send(calls.job_act(act, reason))
    except ClientError as error:
        await app.back()
        app.notice(_refused(error))
        return
    known = [other for other in app.state.snapshot().jobs if other.id != job.id]
    app.state.load(app.clock(), jobs=[*known, job])
    await app.back()
    app.notice(_words(act, job))


def _words(act: Act, job: Job) -> str:
    if act.kind == "cancel":
        return f"Job {job.id} is {'being cancelled' if job.cancelling else job.state}. 8 shows it."
    return f"Job {job.id} {job.kind} {job.target} is {job.state}. 8 shows how far it is."


def _refused(error: ClientError) -> str:
    if isinstance(error, UnreachableError):
        return "No answer: whether the job was taken is unknown. 8 shows it once LIVE again."
    if error.status in (401, 403):
        return "Acting needs the operator's token: $PERILUNE_TOKEN, or the token file of the data folder."
    return f"Nothing was done: {error}"
