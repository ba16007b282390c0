"""Audit: who changed what, newest first."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal

from console.tui import details
from console.tui.context import Context
from console.tui.frame import DETAIL_WIDTH, WIDE_WIDTH
from console.tui.lines import LinesView
from console.tui.pages.base import Location, Page
from console.tui.widgets.rows import RowsView
from console.viewmodel import audit
from console.viewmodel.table import Table


class AuditPage(Page):
    """Each write is one row."""

    DEFAULT_CSS = f"""
    AuditPage #detail {{ width: {DETAIL_WIDTH}; height: 1fr; padding-left: 1; }}
    """
    noun = "audit"
    title = "Audit"
    fields = audit.FIELDS
    url = "/audit"

    def __init__(self) -> None:
        super().__init__()
        self._rows = RowsView()
        self._detail = LinesView("detail")
        self._shown: Context | None = None

    def compose(self) -> ComposeResult:
        """The rows; on wide screens the one at the cursor beside them."""
        with Horizontal():
            yield self._rows
            yield self._detail

    def rows_view(self) -> RowsView:
        """The rows."""
        return self._rows

    def opens(self) -> tuple[str, Location | None]:
        """Enter shows a row unshortened."""
        row = self._rows.cursor
        return ("open", Location("audit_row", row.key)) if row else ("", None)

    def show_context(self, context: Context) -> None:
        """Draw the rows that match."""
        self._shown = context
        table = audit.audit(context.snapshot.audit, now=context.server_now, tz=context.tz)
        if context.loading:
            table = Table(table.columns, (), context.loading)
        self._rows.set_table(self.filtered.apply(table), stale=context.stale)
        self.show_detail()

    def show_detail(self) -> None:
        """The pane that follows the cursor on wide screens."""
        context, row = self._shown, self._rows.cursor
        wide = context is not None and context.width >= WIDE_WIDTH
        self._detail.display = wide
        if context is None or row is None or not wide:
            self._detail.show([])
            return
        self._detail.show(details.audit_lines(context, row.key, DETAIL_WIDTH - 1))

    def on_rows_view_moved(self) -> None:
        """Keep the pane with the cursor."""
        self.show_detail()
