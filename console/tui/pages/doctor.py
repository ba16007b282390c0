"""Doctor: what is wrong with nodes and the paths between them, and what to do."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from console.tui.context import Context
from console.tui.details import field_lines
from console.tui.doctor_lines import head_lines
from console.tui.frame import COMPACT_HEIGHT, DETAIL_WIDTH, SMALL_HEIGHT, WIDE_WIDTH
from console.tui.keys import RUN_DOCTOR
from console.tui.lines import Line, LinesView, line, toned
from console.tui.pages.base import Location, Page
from console.tui.widgets.rows import RowsView
from console.viewmodel import acts, doctor
from console.viewmodel.acts import Act
from console.viewmodel.table import Row

_BELOW_LINES = 6
_BELOW_LINES_COMPACT = 5
_BELOW_LINES_SMALL = 3


class DoctorPage(Page):
    """Findings first; then all checks by node and by pair. The check at the cursor stands in full
    below the list, on wide screens beside it."""

    DEFAULT_CSS = f"""
    DoctorPage #detail {{ width: {DETAIL_WIDTH}; height: 1fr; padding-left: 1; }}
    DoctorPage #main {{ width: 1fr; height: 1fr; }}
    """
    noun = "doctor"
    title = "Doctor"
    keys = (RUN_DOCTOR,)
    fields = doctor.FIELDS
    views = doctor.VIEWS
    url = "/doctor"
    needs = frozenset({"doctor"})

    def __init__(self) -> None:
        super().__init__()
        self._head = LinesView()
        self._rows = RowsView()
        self._below = LinesView()
        self._detail = LinesView("detail")
        self._shown: Context | None = None

    def compose(self) -> ComposeResult:
        """State of the run, checks, the one at the cursor."""
        yield self._head
        with Horizontal():
            with Vertical(id="main"):
                yield self._rows
                yield self._below
            yield self._detail

    def rows_view(self) -> RowsView:
        """The checks."""
        return self._rows

    def opens(self) -> tuple[str, Location | None]:
        """The node, or the pair's transfers."""
        word, place = super().opens()
        return (f"open the {place.noun}" if place else word), place

    def show_context(self, context: Context) -> None:
        """Draw the last run, or the one under way."""
        self._shown = context
        report = context.snapshot.doctor
        self._head.show(head_lines(context), stale=context.stale)
        view = doctor.VIEWS[self.view_index]
        table = doctor.checks(report, view)
        self._rows.set_table(self.filtered.apply(table), stale=context.stale)
        self.show_detail()

    def show_detail(self) -> None:
        """What the check at the cursor found, wants, and what to do."""
        context, row = self._shown, self._rows.cursor
        if context is None:
            return
        wide = context.width >= WIDE_WIDTH
        self._detail.display, self._below.display = wide, not wide
        if wide:
            self._detail.show(check_lines(row, DETAIL_WIDTH - 1), stale=context.stale)
            return
        room = _BELOW_LINES if context.height >= COMPACT_HEIGHT else _BELOW_LINES_COMPACT
        room = _BELOW_LINES_SMALL if context.height < SMALL_HEIGHT else room
        lines = [*check_lines(row, context.width)[:room], *([line("")] * room)]
        self._below.show([line(""), *lines[:room]], stale=context.stale)  # at a fixed height

    def on_rows_view_moved(self) -> None:
        """Keep the pane with the cursor."""
        self.show_detail()

    def act_on(self, action: str) -> Act | str:
        """Look at all nodes and pairs again."""
        snapshot = self._shown.snapshot if self._shown else None
        if snapshot is None:
            return doctor.NOT_YET
        return acts.run_doctor(snapshot.doctor, len(snapshot.nodes))


def check_lines(row: Row | None, width: int) -> list[Line]:
    """One check in full."""
    if row is None:
        return []
    state, where, check = row.cells[:3]
    title = line(
        " ", toned(state.text, state.tone), "  ", toned(f"{where.text}  {check.text}", "strong")
    )
    return [title, *field_lines(doctor.describe(row), width)]
