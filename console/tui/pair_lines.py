"""A pair of nodes in full, as lines: for its screen and for plain text."""

from __future__ import annotations

from console.tui.context import Context
from console.tui.doctor_lines import pair_doctor_lines, wrapped
from console.tui.lines import Line, line, table_lines, toned
from console.viewmodel.node_pair import node_pair
from console.viewmodel.table import Table


def node_pair_lines(context: Context, source: str, target: str, width: int) -> list[Line]:
    """Alarms first; what moved, where the time went, links, slowest, the doctor's word."""
    snapshot = context.snapshot
    view = node_pair(
        source,
        target,
        snapshot.transfers_of(source, target),
        matrix=snapshot.matrix,
        nodes=snapshot.nodes,
    )
    lines = [line(toned(f" {view.name}", "strong"))]
    for text in (*view.alarms, *view.head):
        lines.extend(wrapped(text, width))
    if source == target:
        return lines
    lines += _titled("MOVED, since the agent started, by path and class", view.kinds, width)
    if not view.kinds.rows:
        return [*lines, *pair_doctor_lines(context, source, target, width)]
    lines += _titled("WHERE THE TIME WENT", view.stages, width)
    lines += _titled("LINKS, as of the last heartbeat", view.links, width)
    for text in view.notes:
        lines.extend(wrapped(text, width))
    lines += _titled("SLOWEST OF THE LAST 10 MIN", view.slowest, width)
    return [*lines, *pair_doctor_lines(context, source, target, width)]


def _titled(title: str, table: Table, width: int) -> list[Line]:
    rows = table_lines(table, width - 2)
    return [line(""), line(toned(f" {title}", "strong")), *(line(" ", *row) for row in rows)]
