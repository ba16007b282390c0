"""Requests: the live tail, what is in flight and what it waits for, who was turned away."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from console.tui import details
from console.tui.context import Context
from console.tui.feed import REQUEST
from console.tui.frame import DETAIL_WIDTH, WIDE_WIDTH
from console.tui.keys import CANCEL_REQUEST, FOLLOW, Key
from console.tui.lines import LinesView
from console.tui.pages.base import Page
from console.tui.request_lines import ledger_head_lines, running_head_lines
from console.tui.widgets.rows import RowsView
from console.viewmodel import acts, ledger, requests, running
from console.viewmodel.acts import Act
from console.viewmodel.filters import FieldKind
from console.viewmodel.table import Table

_VIEW_KEYS: dict[str, tuple[Key, ...]] = {
    "live": (FOLLOW,),
    "in flight": (CANCEL_REQUEST,),
    "rejections": (),
}
_FIELDS = {"live": requests.FIELDS, "in flight": running.FIELDS, "rejections": ledger.FIELDS}
_NEEDS = {"live": "", "in flight": "running", "rejections": "ledger"}
_URLS = {"live": "/requests", "in flight": "/in-flight", "rejections": "/rejections"}


class RequestsPage(Page):
    """In the live view, scrolling up holds the rows and counts what came meanwhile."""

    DEFAULT_CSS = f"""
    RequestsPage #detail {{ width: {DETAIL_WIDTH + 14}; height: 1fr; padding-left: 1; }}
    RequestsPage #main {{ width: 1fr; height: 1fr; }}
    """
    noun = "requests"
    title = "Requests"
    views = tuple(_VIEW_KEYS)

    def __init__(self) -> None:
        super().__init__()
        self._head = LinesView()
        self._tail = RowsView(follow=True)
        self._list = {view: RowsView() for view in self.views[1:]}
        self._detail = LinesView("detail")
        self._shown: Context | None = None

    @property
    def keys(self) -> Sequence[Key]:  # type: ignore[override]  # what works depends on the view
        """Those of the view."""
        return _VIEW_KEYS[self.view]

    @property
    def fields(self) -> dict[str, FieldKind]:  # type: ignore[override]  # as above
        """What the view's filter knows."""
        return _FIELDS[self.view]

    @property
    def url(self) -> str:  # type: ignore[override]  # as above
        """The page of the view."""
        return _URLS[self.view]

    @property
    def wanted(self) -> frozenset[str]:
        """The gateways are asked only while what they say is shown; beside a list the request at
        the cursor may be none of the last ones."""
        row, context = self.rows_view().cursor, self._shown
        beside = context is not None and context.width >= WIDE_WIDTH and row is not None
        request = {REQUEST + row.opens.partition("/")[2]} if beside and row is not None else set()
        return frozenset({_NEEDS[self.view], *request} - {""})

    def compose(self) -> ComposeResult:
        """Head of the view, rows; on wide screens the request at the cursor beside them."""
        with Horizontal():
            with Vertical(id="main"):
                yield self._head
                yield self._tail
                yield from self._list.values()
            yield self._detail

    def open_view(self, name: str) -> None:
        """`in_flight`, `rejections`: the last part of a console path."""
        wanted = name.replace("_", " ")
        if wanted in self.views:
            self.view_index = self.views.index(wanted)

    def rows_view(self) -> RowsView:
        """The rows of the view."""
        return self._list.get(self.view, self._tail)

    def right(self) -> str:
        """What came while the view holds, then the filter."""
        below = self._tail.num_below if self.view == "live" else 0
        new = f"{below} new below  " if below else ""
        return new + super().right()

    def do(self, action: str) -> bool:
        """A filter is of one view: the next has other fields."""
        before = self.view
        done = super().do(action)
        if self.view != before:
            self.filtered = type(self.filtered)()
        return done

    def show_context(self, context: Context) -> None:
        """Draw the rows that match."""
        self._shown = context
        for view in (self._tail, *self._list.values()):
            view.display = view is self.rows_view()
        table = Table((), (), context.loading) if context.loading else self._table(context)
        head = []
        wide = DETAIL_WIDTH + 14 if context.width >= WIDE_WIDTH else 0
        if not context.loading and self.view == "in flight":
            head = running_head_lines(context, context.width - wide)
        elif not context.loading and self.view == "rejections":
            head = ledger_head_lines(context, context.width - wide, context.height)
        self._head.display = bool(head)
        self._head.show(head, stale=context.stale)
        self.rows_view().set_table(self.filtered.apply(table), stale=context.stale)
        self.show_detail()

    def _table(self, context: Context) -> Table:
        snapshot = context.snapshot
        if self.view == "in flight":
            return running.running(snapshot.running)
        if self.view == "rejections":
            if snapshot.ledger is None:
                return Table(ledger.COLUMNS, (), ledger.NOT_YET)
            entries = snapshot.ledger.page.items
            return ledger.ledger(entries, now=context.server_now, tz=context.tz)
        return requests.requests(snapshot.decisions, now=context.server_now, tz=context.tz)

    def show_detail(self) -> None:
        """The pane that follows the cursor on wide screens."""
        context, row = self._shown, self.rows_view().cursor
        wide = context is not None and context.width >= WIDE_WIDTH
        self._detail.display = wide
        if context is None or row is None or not wide:
            self._detail.show([])
            return
        name = row.opens.partition("/")[2]
        lines = details.request_lines(context, name, DETAIL_WIDTH + 13)
        self._detail.show(lines, stale=context.stale)

    def on_rows_view_moved(self) -> None:
        """Keep the pane with the cursor."""
        self.show_detail()

    def act_on(self, action: str) -> Act | str:
        """Cancel the request at the cursor."""
        row = self.selected()
        if row is None:
            return "Nothing is in flight here."
        found = self._shown.snapshot.running if self._shown else None
        return acts.cancel_running(found, row.key)
