"""Jobs: what operators asked for, how far it is, what came of it."""

from __future__ import annotations

from textual.app import ComposeResult

from console.tui.context import Context
from console.tui.keys import CANCEL, UNDO
from console.tui.pages.base import Page
from console.tui.widgets.rows import RowsView
from console.viewmodel import acts, jobs
from console.viewmodel.acts import Act
from controlplane.jobs.schemas import Job


class JobsPage(Page):
    """Newest first; K cancels the job at the cursor, Z takes it back."""

    noun = "jobs"
    title = "Jobs"
    keys = (CANCEL, UNDO)
    fields = jobs.FIELDS
    url = "/jobs"

    def __init__(self) -> None:
        super().__init__()
        self._rows = RowsView()
        self._jobs: dict[str, Job] = {}

    def compose(self) -> ComposeResult:
        """One table."""
        yield self._rows

    def rows_view(self) -> RowsView:
        """The list."""
        return self._rows

    def show_context(self, context: Context) -> None:
        """Draw the jobs of now."""
        rows = context.snapshot.jobs
        self._jobs = {str(job.id): job for job in rows}
        table = jobs.jobs(rows, now=context.server_now, tz=context.tz)
        self._rows.set_table(self.filtered.apply(table), stale=context.stale)

    def act_on(self, action: str) -> Act | str:
        """What the key would do to the job at the cursor, or why nothing."""
        row = self._rows.cursor
        job = self._jobs.get(row.key) if row else None
        if job is None:
            return "There is no job at the cursor."
        if action == "cancel_job":
            return acts.cancel(job) or f"Job {job.id} is {job.state}: there is nothing to cancel."
        return acts.undo(job) or acts.why_no_undo(job)
