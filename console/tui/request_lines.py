"""What stands above the requests in flight and above the ledger."""

from __future__ import annotations

from console.tui.context import Context
from console.tui.doctor_lines import wrapped
from console.tui.frame import COMPACT_HEIGHT, SMALL_HEIGHT
from console.tui.lines import Line, line, table_lines
from console.viewmodel import ledger, running, worker_health

MAX_SILENT = 4


def running_head_lines(context: Context, width: int) -> list[Line]:
    """How many in which states; each gateway that does not answer."""
    texts = running.head(context.snapshot.running, now=context.server_now, tz=context.tz)
    lines = [part for text in texts[: MAX_SILENT + 3] for part in wrapped(text, width)]
    return [*lines, line("")]


def ledger_head_lines(context: Context, width: int, height: int) -> list[Line]:
    """What the last hour comes to; by class where there is room."""
    report = context.snapshot.ledger
    head = ledger.head(
        report.summary if report else None,
        context.snapshot.policies,
        now=context.server_now,
        tz=context.tz,
    )
    few = head.causes if height >= SMALL_HEIGHT else head.causes[:1]
    texts = (head.counts, *few, head.wrong)
    lines = [part for text in texts for part in wrapped(text, width)]
    if height >= COMPACT_HEIGHT and len(head.classes.rows) > 1:
        lines.extend([line(""), *(line(" ", *row) for row in table_lines(head.classes, width - 2))])
    return [*lines, line("")]


def health_head_lines(context: Context, width: int) -> list[Line]:
    """Who is left out; each gateway's own predictions, or since when it is silent."""
    texts = worker_health.head(context.snapshot.gateways)
    lines = [part for text in texts[: MAX_SILENT + 1] for part in wrapped(text, width)]
    return [*lines, line("")]
