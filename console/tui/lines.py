"""Lines of styled text: laid out to a width, and drawn by a widget that sends only what changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from console.tui.caps import tone_style
from console.viewmodel.numbers import NO_TRAFFIC
from console.viewmodel.table import Row, Table, Text, Tone

REVERSE = Style(reverse=True)
STALE = tone_style("stale")
GROWTH = 3
"""A growing column with others at its right gets at most so many times its declared width."""


CUT = "~"
"""Where a line or a cell goes on beyond the room it has."""
INDENT = "  "
LEAST_WIDTH = 8
"""Of a column that has to give way."""


@dataclass(frozen=True, slots=True)
class Span:
    """Text with a style."""

    text: str
    style: Style = Style()  # noqa: RUF009 - immutable


Line = tuple[Span, ...]


def line(*parts: str | Text | Span) -> Line:
    """A line of plain strings, toned texts and spans."""
    return tuple(_span(part) for part in parts)


def _span(part: str | Text | Span) -> Span:
    if isinstance(part, Span):
        return part
    return Span(part) if isinstance(part, str) else Span(part.text, tone_style(part.tone))


def toned(text: str, tone: Tone) -> Span:
    """A span by tone."""
    return Span(text, tone_style(tone))


def reversed_line(spans: Line) -> Line:
    """The cursor's row: one bar, readable without colour."""
    return tuple(Span(span.text, Style(reverse=True, bold=span.style.bold)) for span in spans)


def plain_text(spans: Line) -> str:
    """The characters alone."""
    return "".join(span.text for span in spans).rstrip()


def fit(text: str, width: int, align: str = "left") -> str:
    """Exactly `width` cells: padded, or cut with a mark. Wide characters count double."""
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + CUT if width > 1 else set_cell_size(text, width)
    pad = " " * (width - size)
    return pad + text if align == "right" else text + pad


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns are drawn, how wide, and how far apart."""

    columns: tuple[tuple[int, int], ...]  # (index, width)
    gap: str = "  "


def lay_out(table: Table, width: int, *, whole: bool = False) -> Layout:
    """Columns at their declared width; when that is too much, at what their cells need, then closer
    together, and then the highest `drop` leaves first. Room that is left goes to those that grow;
    with `whole`, first to what their text needs, and what then is too wide leaves the last of them
    the narrower."""
    needs = [_needed(table, index) for index in range(len(table.columns))]
    kept = list(range(len(table.columns)))
    full = {index: max(table.columns[index].width, needs[index]) for index in kept}
    while True:
        for sizes, gap in ((full, 2), (dict(enumerate(needs)), 2), (dict(enumerate(needs)), 1)):
            total = sum(sizes[index] for index in kept) + gap * (len(kept) - 1)
            if total <= width:
                start = _with_text(table, kept, sizes, width - total) if whole else sizes
                spare = width - gap * (len(kept) - 1) - sum(start[index] for index in kept)
                return _spread(table, kept, start, full, spare, " " * gap)
        drop = max((table.columns[index].drop for index in kept), default=0)
        if drop == 0:
            return _squeezed(table, kept, dict(enumerate(needs)), width)
        kept = [index for index in kept if table.columns[index].drop != drop]


def _needed(table: Table, index: int, limit: int = 40) -> int:
    """What the label and the longest cell take; long free text settles for its declared width."""
    column = table.columns[index]
    longest = max((cell_len(row.cells[index].text) for row in table.rows), default=0)
    return max(cell_len(column.label), min(longest, column.width if column.grow else limit))


def _with_text(table: Table, kept: list[int], sizes: dict[int, int], spare: int) -> dict[int, int]:
    """Words before padding: growing columns get what their longest cell takes."""
    sizes = dict(sizes)
    for index in kept:
        if table.columns[index].grow:
            longest = max((cell_len(row.cells[index].text) for row in table.rows), default=0)
            extra = max(0, min(spare, longest - sizes[index]))
            sizes[index] += extra
            spare -= extra
    return sizes


def _squeezed(table: Table, kept: list[int], sizes: dict[int, int], width: int) -> Layout:
    """Nothing more may leave: the last growing column takes what there is, so that its cut shows."""
    over = sum(sizes[index] for index in kept) + len(kept) - 1 - width
    growing = [index for index in kept if table.columns[index].grow]
    if over > 0 and growing:
        sizes[growing[-1]] = max(LEAST_WIDTH, sizes[growing[-1]] - over)
    return Layout(tuple((index, sizes[index]) for index in kept), " ")


def _spread(
    table: Table, kept: list[int], sizes: dict[int, int], full: dict[int, int], spare: int, gap: str
) -> Layout:
    widths = {index: sizes[index] for index in kept}
    for index in kept:
        extra = min(spare, full[index] - widths[index])
        widths[index] += extra
        spare -= extra
    growing = [index for index in kept if table.columns[index].grow]
    for place, index in enumerate(growing):
        share = spare // (len(growing) - place)
        if index != kept[-1]:  # further apart than this, the eye loses the row
            share = min(share, max(0, GROWTH * table.columns[index].width - widths[index]))
        widths[index] += share
        spare -= share
    return Layout(tuple(widths.items()), gap)


def header_line(table: Table, width: int) -> Line:
    """Column labels."""
    columns, found = table.columns, lay_out(table, width)
    parts = [fit(columns[index].label, size, columns[index].align) for index, size in found.columns]
    return (toned(found.gap.join(parts), "muted"),)


def row_line(table: Table, row: Row, width: int, found: Layout | None = None) -> Line:
    """One row's cells. `found` saves working out the layout for every row."""
    found = found or lay_out(table, width)
    spans: list[Span] = []
    for index, size in found.columns:
        if spans:
            spans.append(Span(found.gap))
        text = row.cells[index]
        spans.append(toned(fit(text.text, size, table.columns[index].align), text.tone))
    return tuple(spans)


def table_lines(table: Table, width: int, limit: int | None = None) -> list[Line]:
    """Header and rows, or the sentence that says why there are none."""
    if not table.rows:
        return [header_line(table, width), (toned(table.empty, "muted"),)]
    rows = table.rows if limit is None else table.rows[:limit]
    found = lay_out(table, width)
    return [header_line(table, width), *(row_line(table, row, width, found) for row in rows)]


def whole_lines(table: Table, width: int) -> list[Line]:
    """As `table_lines`, with nothing cut off: words go on below, and so do columns for which there
    is no room, each after its label."""
    if not table.rows:
        return table_lines(table, width)
    found = lay_out(table, width, whole=True)
    kept = {index for index, _ in found.columns}
    gone = [index for index in range(len(table.columns)) if index not in kept]
    parts = [
        fit(table.columns[index].label, size, table.columns[index].align)
        for index, size in found.columns
    ]
    lines: list[Line] = [(toned(found.gap.join(parts), "muted"),)]
    for row in table.rows:
        first, rest = _parted(table, row, found)
        lines.append(row_line(table, first, width, found))
        lead = Span(" " * max(0, width - found.columns[-1][1]))
        lines.extend((lead, toned(part, row.cells[found.columns[-1][0]].tone)) for part in rest)
        lines.extend(_told_below(table, row, gone, width))
    return lines


def _parted(table: Table, row: Row, found: Layout) -> tuple[Row, list[str]]:
    """The row with as much of its last cell as fits, and what goes on below it."""
    index, size = found.columns[-1]
    text = row.cells[index]
    if not table.columns[index].grow or cell_len(text.text) <= size:
        return row, []
    parts = wrap(text.text, size if text.text.isascii() else max(1, size // 2))
    cells = list(row.cells)
    cells[index] = Text(parts[0], text.tone)
    return replace(row, cells=tuple(cells)), parts[1:]


def _told_below(table: Table, row: Row, gone: list[int], width: int) -> Iterator[Line]:
    """Columns for which there is no room; what has no value is left out."""
    told = [
        f"{table.columns[index].label} {row.cells[index].text}"
        for index in gone
        if row.cells[index].text not in ("", NO_TRAFFIC)
    ]
    kept: list[str] = []
    for one in told:  # a value stays on the line of its label
        if kept and cell_len("  ".join([INDENT, *kept, one])) > width:
            yield (toned("  ".join([INDENT, *kept]), "muted"),)
            kept = []
        kept.append(one)
    if kept:
        yield (toned("  ".join([INDENT, *kept]), "muted"),)


class LinesView(Widget, can_focus=False):
    """Draws lines as they are; a changed line is sent, an equal one is not."""

    DEFAULT_CSS = """
    LinesView { height: auto; width: 1fr; }
    """

    def __init__(self, view_id: str | None = None) -> None:
        super().__init__(id=view_id)
        self._lines: list[Line] = []
        self._stale = False

    @property
    def lines(self) -> list[Line]:
        """What is drawn."""
        return self._lines

    def show(self, lines: Sequence[Line], *, stale: bool = False) -> None:
        """Draw these lines instead; stale ones lose their colours."""
        old, self._lines = self._lines, list(lines)
        if stale != self._stale:
            self._stale = stale
            self.refresh()
        if (
            len(old) != len(self._lines)
            and self.styles.height is not None
            and self.styles.height.is_auto
        ):
            self.refresh(layout=True)
            return
        width = self.size.width
        changed = [
            Region(0, y, width, 1)
            for y in range(max(len(old), len(self._lines)))
            if _at(old, y) != _at(self._lines, y)
        ]
        if changed and width:
            self.refresh(*changed)
        elif changed:
            self.refresh()  # hidden: its lines are cached all the same

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        """As many rows as lines."""
        return len(self._lines)

    def render_line(self, y: int) -> Strip:
        """One line, padded to the width, or cut with a mark."""
        width = self.size.width
        spans = _at(self._lines, y)
        style = STALE if self._stale else None
        segments = [
            Segment(span.text, span.style if style is None else _faded(span.style))
            for span in spans
        ]
        strip = Strip(segments)
        if width > 1 and cell_len(plain_text(spans)) > width:
            return Strip([*strip.adjust_cell_length(width - 1), Segment(CUT, STALE)], width)
        return strip.adjust_cell_length(width, Style())


def _faded(style: Style) -> Style:
    """Values keep, colours leave."""
    return STALE + REVERSE if style.reverse else STALE


def _at(lines: Sequence[Line], y: int) -> Line:
    return lines[y] if 0 <= y < len(lines) else ()
