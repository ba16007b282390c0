"""Topology: nodes and workers, pairings, workers as the gateways meet them."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from console.tui import details
from console.tui.context import Context
from console.tui.frame import COMPACT_HEIGHT, DETAIL_WIDTH, WIDE_WIDTH
from console.tui.lines import LinesView, line, table_lines, toned
from console.tui.pages.base import Page
from console.tui.request_lines import health_head_lines
from console.tui.widgets.rows import RowsView
from console.viewmodel import topology, worker_health
from console.viewmodel.filters import FieldKind
from console.viewmodel.table import Table


class TopologyPage(Page):
    """A lost or returned node keeps its one row."""

    DEFAULT_CSS = f"""
    TopologyPage #detail {{ width: {DETAIL_WIDTH}; height: 1fr; padding-left: 1; }}
    TopologyPage #main {{ width: 1fr; height: 1fr; }}
    """
    noun = "topology"
    title = "Topology"
    views = ("nodes", "workers", "pairings", "health")
    url = "/topology"

    def __init__(self) -> None:
        super().__init__()
        self._head = LinesView()
        self._rows = RowsView()
        self._below = LinesView()
        self._detail = LinesView("detail")
        self._shown: Context | None = None

    def compose(self) -> ComposeResult:
        """The list, pairings below, the row at the cursor beside."""
        with Horizontal():
            with Vertical(id="main"):
                yield self._head
                yield self._rows
                yield self._below
            yield self._detail

    @property
    def fields(self) -> dict[str, FieldKind]:  # type: ignore[override]  # of the view
        """What the view's filter knows."""
        return worker_health.FIELDS if self.view == "health" else topology.FIELDS

    def open_view(self, name: str) -> None:
        """`health`: the last part of a console path."""
        if name in self.views:
            self.view_index = self.views.index(name)

    def do(self, action: str) -> bool:
        """A filter of one table means nothing on another one."""
        fields = self.fields
        done = super().do(action)
        if self.fields is not fields:
            self.filtered = type(self.filtered)()
        return done

    def rows_view(self) -> RowsView:
        """The list."""
        return self._rows

    def show_context(self, context: Context) -> None:
        """Draw the view; a row's own age greys it, whatever the others do."""
        self._shown = context
        table = Table((), (), context.loading) if context.loading else self._table(context)
        self._rows.set_table(self.filtered.apply(table), stale=context.stale)
        health = self.view == "health" and not context.loading
        self._head.display = health
        pane = DETAIL_WIDTH if context.width >= WIDE_WIDTH else 0
        self._head.show(health_head_lines(context, context.width - pane) if health else [])
        roomy = context.height >= COMPACT_HEIGHT and self.view == "nodes" and not context.loading
        self._below.display = roomy
        needed = max(2, self.filtered.shown + 1)
        self._rows.styles.height = min(needed, context.height - 16) if roomy else "1fr"
        if roomy:
            pairs = topology.pairings(context.snapshot.decisions, now=context.server_now)
            width = context.width - (DETAIL_WIDTH if context.width >= WIDE_WIDTH else 0)
            head = [line(""), line(toned(" PAIRINGS, last 5 min", "strong"))]
            below = [line(" ", *row) for row in table_lines(pairs, width - 2, 8)]
            self._below.show([*head, *below], stale=context.stale)
        self.show_detail()

    def show_detail(self) -> None:
        """The pane that follows the cursor on wide screens."""
        context = self._shown
        wide = context is not None and context.width >= WIDE_WIDTH
        self._detail.display = wide
        row = self._rows.cursor
        if context is None or not wide or row is None or self.view == "pairings":
            self._detail.show([])
            return
        noun, _, name = row.opens.partition("/")
        draw = details.worker_lines if noun == "worker" else details.node_lines
        self._detail.show(draw(context, name, DETAIL_WIDTH - 1), stale=context.stale)

    def on_rows_view_moved(self) -> None:
        """Keep the pane with the cursor."""
        self.show_detail()

    def _table(self, context: Context) -> Table:
        if self.view == "workers":
            return topology.workers(context.snapshot)
        if self.view == "pairings":
            return topology.pairings(context.snapshot.decisions, now=context.server_now)
        if self.view == "health":
            return worker_health.worker_health(context.snapshot.gateways)
        return topology.nodes(context.snapshot, now=context.now)
