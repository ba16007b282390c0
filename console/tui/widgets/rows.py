"""A table with a cursor that follows the row's key, never its position."""

from __future__ import annotations

from textwrap import wrap

from textual import events
from textual.message import Message

from console.tui.lines import (
    Line,
    LinesView,
    Span,
    header_line,
    lay_out,
    reversed_line,
    row_line,
    toned,
)
from console.viewmodel.table import Row, Table


class RowsView(LinesView):
    """Fills the space it is given. `follow` keeps the cursor on the last row while untouched."""

    DEFAULT_CSS = """
    RowsView { height: 1fr; }
    """

    class Opened(Message):
        """A second click on the row at the cursor."""

        def __init__(self, row: Row) -> None:
            super().__init__()
            self.row = row

    class Moved(Message):
        """The cursor is on another row."""

    def __init__(self, view_id: str | None = None, *, follow: bool = False) -> None:
        super().__init__(view_id)
        self.table = Table((), ())
        self.follow = follow
        self._anchor_end = follow
        self._key: str | None = None
        self._index = 0
        self._top = 0
        self._touched = False
        self._dimmed = False
        self._active = True

    @property
    def cursor(self) -> Row | None:
        """The row that is shown as selected."""
        return self.table.rows[self._index] if self.table.rows else None

    @property
    def num_below(self) -> int:
        """Rows under the window: what came while reading further up."""
        return max(0, len(self.table.rows) - self._top - self._room())

    @property
    def active(self) -> bool:
        """Whether this pane shows its cursor."""
        return self._active

    def set_active(self, active: bool) -> None:
        """Show or hide the cursor."""
        self._active = active
        self._redraw()

    def set_table(self, table: Table, *, stale: bool = False) -> None:
        """New rows; cursor and scroll stay with the key, clamped if the row is gone."""
        offset = self._index - self._top
        self.table = table
        self._dimmed = stale
        last = max(0, len(table.rows) - 1)
        if not self._touched:
            self._index = last if self._anchor_end and self.follow else 0
        else:
            found = None if self._key is None else table.index(self._key)
            self._index = min(self._index, last) if found is None else found
        self._top = self._index - offset
        self._remember()
        self._redraw()

    def select(self, key: str) -> bool:
        """Put the cursor on a row, if it is there."""
        found = self.table.index(key)
        if found is None:
            return False
        self._touched = True
        self._index = found
        self._remember()
        self._redraw()
        return True

    def move(self, rows: int) -> None:
        """Move the cursor by rows."""
        self._go(self._index + rows)

    def move_page(self, pages: float) -> None:
        """Move by parts of the window."""
        self._go(self._index + int(pages * max(1, self._room())))

    def move_to_end(self, *, last: bool) -> None:
        """First or last row; on the last one a followed table follows again."""
        self._go(len(self.table.rows) - 1 if last else 0)

    def toggle_follow(self) -> bool:
        """Follow the newest row, or hold."""
        self.follow = not self.follow
        if self.follow:
            self._touched = False
            self._anchor_end = True
            self._go_silently(len(self.table.rows) - 1)
        else:
            self._touched = True
        return self.follow

    def _go(self, index: int) -> None:
        last = max(0, len(self.table.rows) - 1)
        self._touched = not (self._anchor_end and self.follow and index >= last)
        self._go_silently(index)

    def _go_silently(self, index: int) -> None:
        before = self._key
        self._index = max(0, min(index, len(self.table.rows) - 1))
        self._remember()
        self._redraw()
        if before != self._key:
            self.post_message(self.Moved())

    def _remember(self) -> None:
        row = self.cursor
        self._key = row.key if row else None

    def _room(self) -> int:
        return max(0, self.size.height - 1)

    def _redraw(self) -> None:
        room = max(1, self._room())
        most = max(0, len(self.table.rows) - room)
        self._top = max(0, min(self._top, most))
        if self._index < self._top:
            self._top = self._index
        elif self._index >= self._top + room:
            self._top = self._index - room + 1
        self.show(self._draw(room), stale=self._dimmed)

    def _draw(self, room: int) -> list[Line]:
        width = max(1, self.size.width - 1)
        margin = Span(" ")
        head = (margin, *header_line(self.table, width))
        if not self.table.rows:
            empty = wrap(self.table.empty, width)
            return [head, *((margin, toned(part, "muted")) for part in empty)]
        shown = self.table.rows[self._top : self._top + room]
        found = lay_out(self.table, width)
        lines: list[Line] = [(margin, *row_line(self.table, row, width, found)) for row in shown]
        place = self._index - self._top
        if self._active and 0 <= place < len(lines):
            lines[place] = reversed_line((Span(">"), *lines[place][1:]))
        return [head, *lines]

    def on_resize(self, event: events.Resize) -> None:
        """Another width lays out anew; the cursor stays in view."""
        self._redraw()

    def on_click(self, event: events.Click) -> None:
        """Click selects, click again opens."""
        index = self._top + event.y - 1
        if event.y < 1 or index >= len(self.table.rows):
            return
        if index == self._index and self.cursor:
            self.post_message(self.Opened(self.cursor))
        else:
            self._go(index)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """The wheel moves the cursor."""
        self.move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """The wheel moves the cursor."""
        self.move(-3)
