"""A heatmap as lines: glyphs or painted cells, one row or half blocks, closed and open columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style

from console.tui.caps import Caps, level_color, level_style, tone_style
from console.tui.lines import REVERSE, Line, Span, fit, toned
from console.viewmodel.heatmap import Cell, Heatmap, HeatRow

HALF = "▀"
MAX_LABEL = 20
_SUMMARY = 9


@dataclass(frozen=True, slots=True)
class Cursor:
    """Places in the heatmap's rows and columns."""

    row: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """Closed columns with the row labels on the left, the open column and summaries on the right.

    A column bucket that is over never changes, so the left part is sent once a bucket.
    """

    left: tuple[Line, ...]
    right: tuple[Line, ...]
    left_width: int


def label_width(heatmap: Heatmap) -> int:
    """Room for the row labels and their breach mark."""
    longest = max((len(row.label) for row in heatmap.rows), default=4)
    return min(MAX_LABEL, max(8, longest)) + 3


def time_columns(width: int, heatmap: Heatmap) -> int:
    """How many buckets fit beside labels, the open mark and the summary."""
    return max(1, width - label_width(heatmap) - _SUMMARY - 2)


def draw_time(
    heatmap: Heatmap, caps: Caps, width: int, height: int, cursor: Cursor | None, top: int = 0
) -> Drawn:
    """Rows of cells, then the time axis. `top` is the first row where rows must scroll."""
    num = min(len(heatmap.columns), time_columns(width, heatmap))
    first = len(heatmap.columns) - num
    closed = range(first, len(heatmap.columns) - 1)
    at_open = len(heatmap.columns) - 1
    labels = label_width(heatmap)
    halves = uses_halves(heatmap, caps, height)
    step = 2 if halves else 1
    left: list[Line] = []
    right: list[Line] = []
    for index in range(top, min(len(heatmap.rows), top + (height - 1) * step), step):
        upper = heatmap.rows[index]
        lower = heatmap.rows[index + 1] if halves and index + 1 < len(heatmap.rows) else None
        on_row = cursor is not None and cursor.row in range(index, index + step)
        place = cursor.column if cursor is not None and on_row else None
        left.append(
            (
                _label(upper, lower, labels, on_row),
                *_cells(upper, lower, closed, caps, place, halves),
            )
        )
        tail = _cells(upper, lower, range(at_open, at_open + 1), caps, place, halves)
        right.append((*tail, Span("< "), *_summary(upper, lower)))
    left.append((toned(" " * labels + axis(heatmap, first, at_open), "muted"),))
    right.append((toned("", "muted"),))
    return Drawn(tuple(left), tuple(right), labels + len(closed))


def uses_halves(heatmap: Heatmap, caps: Caps, height: int) -> bool:
    """Two rows a line where they do not fit otherwise and the terminal can paint."""
    return caps.paints and not caps.ascii_only and len(heatmap.rows) > max(1, height - 1)


def _label(upper: HeatRow, lower: HeatRow | None, width: int, on_row: bool) -> Span:
    breach = upper.breach or (lower is not None and lower.breach)
    text = fit(f" {upper.label}", width - 2) + ("!" if breach else " ") + " "
    style = tone_style("warn") if breach else Style()
    return Span(text, style + REVERSE if on_row else style)


def _summary(upper: HeatRow, lower: HeatRow | None) -> tuple[Span, ...]:
    breach = upper.breach or (lower is not None and lower.breach)
    return (toned(fit(upper.summary, _SUMMARY - 2, "right"), "warn" if breach else "plain"),)


def _cells(
    upper: HeatRow,
    lower: HeatRow | None,
    columns: range,
    caps: Caps,
    place: int | None,
    halves: bool,
) -> list[Span]:
    """Neighbours that look alike are one span: fewer bytes."""
    spans: list[Span] = []
    for index in columns:
        if halves:
            span = half_cell(upper.cells[index], lower.cells[index] if lower else None, caps)
        else:
            span = one_cell(upper.cells[index], caps)
        if index == place:
            span = Span(span.text, span.style + REVERSE)
        if spans and spans[-1].style == span.style:
            spans[-1] = Span(spans[-1].text + span.text, span.style)
        else:
            spans.append(span)
    return spans


def one_cell(cell: Cell, caps: Caps) -> Span:
    """A glyph; painted where the terminal can, then the alarm shows as `!`."""
    if cell.level is None:
        return toned("R" if cell.mark == "R" else cell.glyph, "muted")
    style = level_style(cell.level, caps)
    if not caps.paints:
        return Span(cell.glyph, style)
    return Span("!" if cell.breach else " ", style)


def half_cell(upper: Cell, lower: Cell | None, caps: Caps) -> Span:
    """Upper row in the foreground, lower row in the background."""
    up = None if upper.level is None else level_color(upper.level, caps)
    down = None if lower is None or lower.level is None else level_color(lower.level, caps)
    if up is None and down is None:
        return toned(upper.glyph, "muted")
    if up is None:
        return Span("▄", Style.from_color(down))
    return Span(HALF, Style.from_color(up, down))


def axis(heatmap: Heatmap, first: int, last: int) -> str:
    """`|13:55     |14:00`: a tick where a label has room, on round times."""
    columns = heatmap.columns[first:last]
    if not columns or columns[0].start is None or columns[0].end is None:
        return ""
    step = columns[0].end - columns[0].start
    every = next((s for s in (60, 120, 300, 600, 1800, 3600, 10800) if s / step >= 9), 21600)
    text = [" "] * (len(columns) + 8)
    free = 0
    for place, column in enumerate(columns):
        if place < free or column.start is None or column.start % every:
            continue
        label = "|" + column.label[:5]
        text[place : place + len(label)] = label
        free = place + len(label) + 1
    return "".join(text)[: len(columns)].rstrip()


def draw_matrix(
    heatmap: Heatmap, caps: Caps, width: int, height: int, cursor: Cursor | None
) -> Drawn:
    """Source rows, destination columns, worst of each at the end."""
    labels = label_width(heatmap)
    num = max(1, len(heatmap.columns))
    cell_width = max(6, min(12, (width - labels - 10) // num))
    room = max(1, (width - labels - 10) // cell_width)
    first = 0 if cursor is None else max(0, min(cursor.column - room + 1, num - room))
    shown = range(first, min(len(heatmap.columns), first + room))
    rows = range(len(heatmap.rows))
    if len(heatmap.rows) > height - 2:
        at = cursor.row if cursor else 0
        top = max(0, min(at - (height - 3), len(heatmap.rows) - (height - 2)))
        rows = range(top, min(len(heatmap.rows), top + height - 2))
    lines = [_matrix_head(heatmap, shown, labels, cell_width, cursor)]
    lines.extend(_matrix_row(heatmap, r, shown, labels, cell_width, caps, cursor) for r in rows)
    totals = [Span(fit(" all", labels))]
    totals.extend(Span(" " + _short(heatmap.totals[c], cell_width - 1)) for c in shown)
    lines.append(tuple(totals))
    return Drawn(tuple(lines), (), width)


def _short(text: str, width: int) -> str:
    """`150 ms`, in a narrow column `150ms`."""
    return fit(text if len(text) <= width else text.replace(" ", ""), width, "right")


def _without_common(labels: Sequence[str], width: int) -> list[str]:
    """Labels that do not fit lose what they all begin with, then their beginning."""
    if all(len(label) < width for label in labels):
        return list(labels)
    shared = len(labels[0])
    while not all(label.startswith(labels[0][:shared]) for label in labels):
        shared -= 1
    kept = [label[min(shared, max(0, len(label) - 2)) :] for label in labels]
    return [label if len(label) < width else label[-(width - 1) :] for label in kept]


def _matrix_head(
    heatmap: Heatmap, shown: range, labels: int, cell_width: int, cursor: Cursor | None
) -> Line:
    spans = [Span(" " * labels)]
    labels_shown = _without_common([column.label for column in heatmap.columns], cell_width)
    for index in shown:
        text = labels_shown[index]
        style = tone_style("muted")
        if cursor is not None and cursor.column == index:
            style = REVERSE
        spans.append(Span(" " * (cell_width - len(text))))
        spans.append(Span(text, style))
    spans.append(toned("      all", "muted"))
    return tuple(spans)


def _matrix_row(
    heatmap: Heatmap,
    index: int,
    shown: range,
    labels: int,
    cell_width: int,
    caps: Caps,
    cursor: Cursor | None,
) -> Line:
    row = heatmap.rows[index]
    on_row = cursor is not None and cursor.row == index
    spans = [_label(row, None, labels, on_row)]
    for column in shown:
        chosen = on_row and cursor is not None and cursor.column == column
        spans.extend(_matrix_cell(row.cells[column], cell_width, caps, chosen))
    spans.append(Span(" " + fit(row.summary, 8, "right")))
    return tuple(spans)


def _matrix_cell(cell: Cell, width: int, caps: Caps, chosen: bool) -> list[Span]:
    """The value where it fits, else its glyph; brackets mark the cursor without colour."""
    body = width - 1
    glyph = one_cell(cell, caps)
    text = cell.glyph
    if cell.level is not None and width >= 9:
        text = f"{cell.text} {cell.glyph}" if not caps.paints else cell.text
    text += "!" if cell.breach else ""
    if chosen:
        text = f"[{text}]"
    style = glyph.style + Style(bold=True) if chosen else glyph.style
    return [Span(" "), Span(fit(text, body, "right"), style)]
