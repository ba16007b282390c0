"""The pool's parts as lines: the head of the cache screens, tables under a title, the curve."""

from __future__ import annotations

from console.tui.context import Context
from console.tui.doctor_lines import wrapped
from console.tui.frame import COMPACT_HEIGHT, COMPACT_WIDTH
from console.tui.lines import Line, Span, line, plain_text, table_lines, toned
from console.tui.plot import plot_lines
from console.viewmodel import curve, jobs, pool
from console.viewmodel.table import Table, Text, Tone

QUEUE_BAR = 10
HEALTH = "HEALTH OF EVICTION, 15 min"


def pool_head_lines(context: Context) -> list[Line]:
    """Policy and its parameters; write queue, stale claims, jobs. Parts flow over as many lines as
    they need."""
    snapshot, width = context.snapshot, context.width
    head = pool.head(snapshot.pool, snapshot.policies)
    tone: Tone = "warn" if head.queue.breach else "plain"
    bar = pool.bar(head.queue.share, QUEUE_BAR)
    queue = f"{bar} {head.queue.text}{'!' if head.queue.breach else ''}".strip()
    policy = [("policy", line(head.policy)[0])]
    compact = width < COMPACT_WIDTH or context.height < COMPACT_HEIGHT
    if head.params and not compact:  # E shows them too
        policy.append(("", toned(head.params, "muted")))
    work = jobs.running(snapshot.jobs)
    state = [("write queue", toned(queue, tone)), ("stale claims", line(head.claims)[0])]
    if width >= COMPACT_WIDTH or any(jobs.is_live(job) for job in snapshot.jobs):
        state.append(("jobs", line(work)[0]))
    lines = [*_flow(policy, width)[:2], *_flow(state, width)]
    return lines if compact else [*lines, line("")]


def _flow(parts: list[tuple[str, Span]], width: int) -> list[Line]:
    """Parts side by side while they fit, then on the next line."""
    lines: list[list[Span]] = [[]]
    for label, value in parts:
        lead = f"{label} " if label else ""
        used = len(plain_text(tuple(lines[-1])))
        if used and used + len(lead) + len(value.text) + 4 > width:
            lines.append([])
        gap = "   " if lines[-1] else " "
        lines[-1] += [toned(f"{gap}{lead}", "muted"), value]
    return [tuple(spans) for spans in lines]


def titled(title: str, table: Table, width: int, limit: int) -> list[Line]:
    """A table under its title; how many of how many rows is said. Nothing where none would fit."""
    if limit < 1:
        return []
    num = len(table.rows)
    more = f"; {limit} of {num}, worst first" if num > limit else ""
    rows = table_lines(table, width - 2, limit)
    return [
        line(""),
        line(toned(f" {title}{more}", "strong")),
        *(line(" ", *row) for row in rows),
    ]


def curve_lines(context: Context, width: int, room: int, *, with_health: bool = True) -> list[Line]:
    """The plot, its verdict, its numbers; where there is room, the health of eviction."""
    report = context.snapshot.pool
    found = curve.curve(report)
    title = line(
        toned(
            " what if the pool were larger or smaller: hit rate of what it is asked for", "strong"
        )
    )
    if found.empty:
        measured = line(f" measured now: {found.measured_text}")
        return [title, line(""), *wrapped(Text(found.empty, "muted"), width), measured]
    table = curve.curve_table(found)
    numbers = [line(" ", *row) for row in table_lines(table, width - 2)]
    verdict = wrapped(Text(found.verdict, "accent"), width) if found.verdict else []
    fixed = 2 + len(verdict) + len(numbers)
    lines = [title, *verdict, *plot_lines(found, width, room - fixed), line(""), *numbers]
    health = titled(HEALTH, pool.health(report), width, 12)
    fits = with_health and len(lines) + len(health) <= room
    return [*lines, *health] if fits else lines
