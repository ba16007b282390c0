"""Transfers: source x destination, of nodes and of workers."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from textual.app import ComposeResult

from console.tui.context import Context
from console.tui.keys import AS_TABLE, NEXT_VALUE
from console.tui.lines import Line, LinesView, line, table_lines, toned
from console.tui.pages.base import Location, Page
from console.tui.pages.cache import move_cells
from console.tui.widgets.heatmap import HeatmapView
from console.viewmodel import node_pair, transfers
from console.viewmodel.heatmap import Heatmap
from console.viewmodel.transfers import TransferValue, View

_MAX_ALARMS = 3


class TransfersPage(Page):
    """The matrix of nodes where there are several, of workers as the other view; pairs below."""

    noun = "transfers"
    title = "Transfers"
    keys = (NEXT_VALUE, AS_TABLE)
    url = "/transfers"
    needs = frozenset({"alarms"})

    def __init__(self) -> None:
        super().__init__()
        self._alarms = LinesView()
        self._figure = HeatmapView()
        self._pairs = LinesView()
        self._value = 0
        self._chosen: View | None = None
        self._first: View = "workers"

    @property
    def view(self) -> View:
        """Chosen by `[ ]`, else what is worth seeing first."""
        return self._chosen or self._first

    @property
    def value(self) -> TransferValue:
        """What the cells show."""
        values = transfers.VALUES_OF[self.view]
        return values[self._value % len(values)]

    def compose(self) -> ComposeResult:
        """Alarms, figure, table."""
        yield self._alarms
        yield self._figure
        yield self._pairs

    def right(self) -> str:
        """The window of the matrix, which is not the window of the rates above."""
        return "5 min"

    def show_context(self, context: Context) -> None:
        """Draw the matrix; the table takes the rows that are left."""
        snapshot = context.snapshot
        if context.loading:
            self._pairs.show([line(" ", toned(context.loading, "muted"))])
            return
        self._first = transfers.first_view(snapshot.nodes)
        alarms = self._alarm_lines(context)
        self._alarms.show(alarms, stale=context.stale)
        self._figure.max_rows = max(3, min(24, context.height - 12 - len(alarms)))
        heatmap = transfers.transfers(
            snapshot.matrix,
            view=self.view,
            workers=snapshot.workers,
            nodes=snapshot.nodes,
            value=self.value,
            previous=self._previous(),
        )
        self._figure.set_heatmap(heatmap, context.caps, stale=context.stale)
        left = context.height - 12 - len(alarms) - len(heatmap.rows)
        self._pairs.show(self._below(context, heatmap, left), stale=context.stale)

    def _previous(self) -> Heatmap | None:
        """The last drawing, if it showed the same."""
        heatmap = self._figure.heatmap
        wanted = f"{'node_' if self.view == 'nodes' else ''}transfers_{self.value}"
        return heatmap if heatmap is not None and heatmap.name == wanted else None

    def _alarm_lines(self, context: Context) -> list[Line]:
        found = node_pair.alarms(context.snapshot.alarms)
        room = max(20, context.width - 2)
        lines = [line(" ", toned(wrap(text.text, room)[0], text.tone)) for text in found]
        if len(lines) <= _MAX_ALARMS:
            return lines
        more = f" {len(lines) - _MAX_ALARMS + 1} more paths carry nothing now: 0 Doctor probes them"
        return [*lines[: _MAX_ALARMS - 1], line(toned(more, "critical"))]

    def _below(self, context: Context, heatmap: Heatmap, left: int) -> Sequence[Line]:
        if heatmap.empty:
            other = "workers" if self.view == "nodes" else "nodes"
            return [line(""), line(toned(f" ] shows the {other}.", "muted"))]
        if left < 3:
            return []
        table = transfers.pair_table(context.snapshot.matrix, self.view)
        rows = table_lines(table, context.width - 2, left - 2)
        return [line(""), *(line(" ", *row) for row in rows)]

    def opens(self) -> tuple[str, Location | None]:
        """Enter on a cell opens the pair."""
        chosen = self._figure.cell
        heatmap = self._figure.heatmap
        if chosen is None or heatmap is None or heatmap.empty or chosen[2].state == "absent":
            return "", None
        if chosen[2].state == "no_traffic" and self.view == "workers":
            return "", None
        return "open the pair", Location("pair", f"{chosen[0].key}/{chosen[1].key}")

    def do(self, action: str) -> bool:
        """Walk cells; `v` shows another value, `[ ]` the other matrix."""
        match action:
            case "next_view" | "previous_view":
                self._chosen = "workers" if self.view == "nodes" else "nodes"
            case "next_value":
                self._value = (self._value + 1) % len(transfers.VALUES_OF[self.view])
            case "as_table":
                self._figure.toggle_table()
            case _:
                return move_cells(self._figure, action)
        return True
