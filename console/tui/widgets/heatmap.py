"""A heatmap with a cursor and a read-out line at a fixed place."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message
from textual.widget import Widget

from console.tui.caps import Caps, level_style
from console.tui.figure import Cursor, Drawn, draw_matrix, draw_time, uses_halves
from console.tui.lines import Line, LinesView, Span, line, plain_text, table_lines, toned
from console.viewmodel.heatmap import Cell, HeatColumn, Heatmap, HeatRow
from console.viewmodel.levels import GLYPHS, legend_of_states
from console.viewmodel.table import Column, Row, Table, Text


class HeatmapView(Widget, can_focus=False):
    """Title and legend, cells, read-out. The cursor keeps to row and column keys."""

    DEFAULT_CSS = """
    HeatmapView { height: auto; width: 1fr; layout: vertical; }
    HeatmapView Horizontal { height: auto; width: 1fr; }
    HeatmapView .left { width: auto; }
    HeatmapView .right { width: 1fr; }
    """

    class Moved(Message):
        """The cursor is on another cell."""

    def __init__(self, *, max_rows: int = 12) -> None:
        super().__init__()
        self.caps = Caps()
        self.max_rows = max_rows
        self.heatmap: Heatmap | None = None
        self.as_table = False
        self._cursor: Cursor | None = None
        self._keys: tuple[str, str] | None = None
        self._active = True
        self._stale = False
        self._head = LinesView()
        self._left = LinesView()
        self._right = LinesView()
        self._foot = LinesView()

    def compose(self) -> ComposeResult:
        """Closed and open columns are two widgets."""
        self._left.add_class("left")
        self._right.add_class("right")
        yield self._head
        with Horizontal():
            yield self._left
            yield self._right
        yield self._foot

    @property
    def cell(self) -> tuple[HeatRow, HeatColumn, Cell] | None:
        """What the cursor is on."""
        if self.heatmap is None or self._cursor is None or not self.heatmap.rows:
            return None
        row = self.heatmap.rows[self._cursor.row]
        return row, self.heatmap.columns[self._cursor.column], row.cells[self._cursor.column]

    def set_active(self, active: bool) -> None:
        """Show or hide the cursor."""
        if active != self._active:
            self._active = active
            self._redraw()

    def set_heatmap(self, heatmap: Heatmap, caps: Caps, *, stale: bool = False) -> None:
        """New cells; the cursor stays on its keys."""
        self.heatmap = heatmap
        self.caps = caps
        self._stale = stale
        self._cursor = self._find()
        self._redraw()

    def move(self, rows: int, columns: int) -> None:
        """Walk data rows and columns."""
        if self.heatmap is None or not self.heatmap.rows or not self.heatmap.columns:
            return
        at = self._cursor or Cursor(0, len(self.heatmap.columns) - 1)
        self._cursor = Cursor(
            max(0, min(at.row + rows, len(self.heatmap.rows) - 1)),
            max(0, min(at.column + columns, len(self.heatmap.columns) - 1)),
        )
        row = self.heatmap.rows[self._cursor.row]
        self._keys = (row.key, self.heatmap.columns[self._cursor.column].key)
        self._redraw()
        self.post_message(self.Moved())

    def move_to_end(self, *, last: bool) -> None:
        """First or last row."""
        self.move(10_000 if last else -10_000, 0)

    def toggle_table(self) -> None:
        """Figure, or its strongest cells as rows."""
        self.as_table = not self.as_table
        self._redraw()

    def _find(self) -> Cursor | None:
        heatmap = self.heatmap
        if heatmap is None or not heatmap.rows or not heatmap.columns:
            return None
        newest = len(heatmap.columns) - 1 if heatmap.axis == "time" else 0
        rows = [row.key for row in heatmap.rows]
        columns = [column.key for column in heatmap.columns]
        gone = self._keys is None or (self._keys[0] not in rows and self._keys[1] not in columns)
        if gone and heatmap.axis == "matrix":
            self._keys = _strongest(heatmap)  # and stays there, whatever becomes stronger
        if self._keys is None:
            return Cursor(0, newest)
        old = self._cursor or Cursor(0, newest)
        return Cursor(
            rows.index(self._keys[0]) if self._keys[0] in rows else min(old.row, len(rows) - 1),
            columns.index(self._keys[1]) if self._keys[1] in columns else 0,
        )

    def _redraw(self) -> None:
        heatmap, width = self.heatmap, self.size.width
        if heatmap is None or not width:
            return
        self._head.show(head_lines(heatmap, self.caps, width), stale=self._stale)
        if heatmap.empty or self.as_table:
            self._left.styles.width = width
            self._left.show(_instead(heatmap, width), stale=self._stale)
            self._right.show([])
            self._foot.show([])
            return
        drawn = self._draw(heatmap, width)
        self._left.styles.width = drawn.left_width
        self._left.show(drawn.left, stale=self._stale)
        self._right.show(drawn.right, stale=self._stale)
        self._foot.show(self._read_out(heatmap, width), stale=self._stale)

    def _draw(self, heatmap: Heatmap, width: int) -> Drawn:
        cursor = self._cursor if self._active else None
        if heatmap.axis == "matrix":
            return draw_matrix(heatmap, self.caps, width, self.max_rows + 2, cursor)
        height = self.max_rows + 1
        top = 0
        if not uses_halves(heatmap, self.caps, height) and self._cursor is not None:
            top = max(0, min(self._cursor.row - self.max_rows + 1, len(heatmap.rows) - 1))
        return draw_time(heatmap, self.caps, width, height, cursor, top)

    def _read_out(self, heatmap: Heatmap, width: int) -> list[Line]:
        chosen = self.cell if self._active else None
        lines = [line(" ", Text(chosen[2].readout, "strong"))] if chosen else []
        if heatmap.verdict:
            lines.append(line(" ", Text(heatmap.verdict, "warn")))
        return lines

    def on_resize(self, event: events.Resize) -> None:
        """Another width, other columns."""
        self._redraw()

    def on_click(self, event: events.Click) -> None:
        """Click puts the cursor on a row of cells."""
        if (
            self.heatmap is None
            or self._cursor is None
            or event.widget not in (self._left, self._right)
        ):
            return
        row = event.y - (1 if self.heatmap.axis == "matrix" else 0)
        if 0 <= row < len(self.heatmap.rows):
            self.move(row - self._cursor.row, 0)


def _strongest(heatmap: Heatmap) -> tuple[str, str] | None:
    """Keys of the cell to look at first."""
    found = heatmap.worst(1)
    return (found[0][0].key, found[0][1].key) if found else None


def head_lines(heatmap: Heatmap, caps: Caps, width: int) -> list[Line]:
    """Title, both ends of the legend in words, what is not a value; on as few lines as fit."""
    title = line(Text(f" {heatmap.title}", "strong"))
    legend, states = legend_line(heatmap, caps), line(toned(f"   {legend_of_states()}", "muted"))
    sizes = [len(plain_text(part)) for part in (title, legend, states)]
    if sizes[1] + sizes[2] + 1 > width:
        return [title, legend, line(toned(f" {legend_of_states()}", "muted"))]
    if sum(sizes) + 4 <= width:
        return [(*title, Span(" " * (width - sum(sizes) - 1)), *legend, *states)]
    return [title, (*legend, *states)]


def legend_line(heatmap: Heatmap, caps: Caps) -> Line:
    """`strong = low   .>=95 :>=85 ...`, each glyph as its cells are drawn."""
    spans = [toned(f" {heatmap.scale.strong}  ", "muted")]
    for level, label in enumerate(heatmap.scale.labels):
        spans.append(Span(" "))
        spans.append(Span(GLYPHS[level], level_style(level, caps)))
        spans.append(toned(label, "muted"))
    return tuple(spans)


WORST_COLUMNS = (
    Column("row", "ROW", 12, grow=True),
    Column("column", "COLUMN", 10),
    Column("value", "VALUE", 10, "right"),
    Column("readout", "WHAT", 40, grow=True),
)


def worst_table(heatmap: Heatmap, count: int = 10) -> Table:
    """The strongest cells as rows: the figure's twin for readers without a screen."""
    rows = tuple(
        Row(
            f"{row.key}:{column.key}",
            (Text(row.label), Text(column.label), Text(cell.text), Text(cell.readout)),
        )
        for row, column, cell in heatmap.worst(count)
    )
    return Table(WORST_COLUMNS, rows, heatmap.empty or "No cell has a value in this window.")


def _instead(heatmap: Heatmap, width: int) -> list[Line]:
    if heatmap.empty:
        return [line(" ", toned(heatmap.empty, "muted"))]
    return table_lines(worst_table(heatmap), width)
