"""Transfers: source x destination."""

from __future__ import annotations

from textual.app import ComposeResult

from console.tui.context import Context
from console.tui.keys import AS_TABLE, NEXT_VALUE
from console.tui.lines import LinesView, line, table_lines
from console.tui.pages.base import Location, Page
from console.tui.pages.cache import move_cells
from console.tui.widgets.heatmap import HeatmapView
from console.viewmodel import transfers


class TransfersPage(Page):
    """The matrix, and its pairs as rows below."""

    noun = "transfers"
    title = "Transfers"
    keys = (NEXT_VALUE, AS_TABLE)
    url = "/transfers"

    def __init__(self) -> None:
        super().__init__()
        self._figure = HeatmapView()
        self._pairs = LinesView()
        self._value = 0
        self._window = ""

    def compose(self) -> ComposeResult:
        """Figure above, table below."""
        yield self._figure
        yield self._pairs

    def right(self) -> str:
        """The window of the matrix, which is not the window of the rates above."""
        return "5 min"

    def show_context(self, context: Context) -> None:
        """Draw the matrix; the table takes the rows that are left."""
        value = transfers.VALUES[self._value]
        self._figure.max_rows = max(3, min(24, context.height - 12))
        previous = self._figure.heatmap
        same = previous is not None and previous.name == f"transfers_{value}"
        heatmap = transfers.transfers(
            context.snapshot.matrix,
            workers=context.snapshot.workers,
            value=value,
            previous=previous if same else None,
        )
        self._figure.set_heatmap(heatmap, context.caps, stale=context.stale)
        left = context.height - 12 - len(heatmap.rows)
        if heatmap.empty or left < 3:
            self._pairs.show([])
            return
        table = transfers.pair_table(context.snapshot.matrix)
        rows = table_lines(table, context.width - 2, left - 2)
        self._pairs.show([line(""), *(line(" ", *row) for row in rows)], stale=context.stale)

    def opens(self) -> tuple[str, Location | None]:
        """Enter on a cell opens the pair."""
        chosen = self._figure.cell
        if chosen is None or chosen[2].state == "no_traffic":
            return "", None
        return "open the pair", Location("pair", f"{chosen[0].key}/{chosen[1].key}")

    def do(self, action: str) -> bool:
        """Walk cells; `v` shows another value."""
        match action:
            case "next_value":
                self._value = (self._value + 1) % len(transfers.VALUES)
            case "as_table":
                self._figure.toggle_table()
            case _:
                return move_cells(self._figure, action)
        return True
