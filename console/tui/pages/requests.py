"""Requests: the live tail, newest at the bottom."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal

from console.tui import details
from console.tui.context import Context
from console.tui.frame import DETAIL_WIDTH, WIDE_WIDTH
from console.tui.keys import FOLLOW
from console.tui.lines import LinesView
from console.tui.pages.base import Page
from console.tui.widgets.rows import RowsView
from console.viewmodel import requests
from console.viewmodel.table import Table


class RequestsPage(Page):
    """Scrolling up holds the view and counts what came meanwhile."""

    DEFAULT_CSS = f"""
    RequestsPage #detail {{ width: {DETAIL_WIDTH + 14}; height: 1fr; padding-left: 1; }}
    """
    noun = "requests"
    title = "Requests"
    keys = (FOLLOW,)
    fields = requests.FIELDS
    views = ("live", "rejections")
    url = "/requests"

    def __init__(self) -> None:
        super().__init__()
        self._rows = RowsView(follow=True)
        self._detail = LinesView("detail")
        self._shown: Context | None = None

    def compose(self) -> ComposeResult:
        """The tail; on wide screens the request at the cursor beside it."""
        with Horizontal():
            yield self._rows
            yield self._detail

    def rows_view(self) -> RowsView:
        """The tail."""
        return self._rows

    def right(self) -> str:
        """What came while the view holds, then the filter."""
        below = self._rows.num_below
        new = f"{below} new below  " if below else ""
        return new + super().right()

    def show_context(self, context: Context) -> None:
        """Draw the rows that match."""
        self._shown = context
        decisions = context.snapshot.decisions
        if self.view == "rejections":
            decisions = tuple(d for d in decisions if d.status == "rejected")
        table = requests.requests(decisions, now=context.server_now, tz=context.tz)
        if context.loading:
            table = Table(table.columns, (), context.loading)
        elif self.view == "rejections" and not table.rows:
            kept = f"{len(context.snapshot.decisions)} requests shown here"
            table = Table(table.columns, (), f"No request was rejected among the last {kept}.")
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
        lines = details.request_lines(context, row.key, DETAIL_WIDTH + 13)
        self._detail.show(lines, stale=context.stale)

    def on_rows_view_moved(self) -> None:
        """Keep the pane with the cursor."""
        self.show_detail()
