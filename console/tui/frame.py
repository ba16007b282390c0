"""Header, breadcrumbs and footer as lines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from console.tui.caps import tone_style
from console.tui.context import Context
from console.tui.keys import Key
from console.tui.lines import REVERSE, Line, Span, fit, line, plain_text, toned
from console.viewmodel import numbers
from console.viewmodel.overview import Figure, figures
from console.viewmodel.table import Tone, clean

MIN_WIDTH, MIN_HEIGHT = 60, 15
COMPACT_WIDTH, COMPACT_HEIGHT = 100, 30
SMALL_HEIGHT = 22
"""Below it a screen shows what is wrong before what is well."""
WIDE_WIDTH = 160
DETAIL_WIDTH = 56


def header(context: Context, width: int, actor: str) -> list[Line]:
    """Cluster, time mark and age; then the numbers that are always visible."""
    return [_first(context, width, actor), _second(context, width)]


def _first(context: Context, width: int, actor: str) -> Line:
    seen = context.snapshot.overview
    name = clean(seen.cluster) if seen else "perilune"
    alarms = _alarms(context)
    rest: list[Span] = []
    if context.snapshot.emulated:
        rest.extend((Span(" "), Span("EMULATED", tone_style("warn") + REVERSE)))
    rest.append(Span("  "))
    rest.extend(_mark(context))
    # A narrow one cuts the name, never what is alarming.
    room = width - 3 - sum(cell_len(span.text) for span in (*rest, *alarms))
    name = fit(name, max(4, min(cell_len(name), room)))
    spans = [Span(f" {name}", tone_style("strong")), *rest]
    role = f"operator {clean(actor)}" if context.is_operator else "viewer"
    # A wide terminal keeps the alarms at the right edge, so that they never move.
    left = plain_text(tuple(spans)) + f"  {role}"
    gap = width - cell_len(left) - sum(cell_len(span.text) for span in alarms) - 1
    if gap >= 2:
        return (*spans, toned(f"  {role}", "muted"), Span(" " * gap), *alarms)
    return (*spans, Span("  "), *alarms)


def _mark(context: Context) -> list[Span]:
    fresh = context.fresh
    now = numbers.clock(context.server_now, context.tz)
    offset = numbers.offset(context.server_now, context.tz)
    match fresh.mark:
        case "connecting":
            return [Span(f"CONNECTING{fresh.retry_text}", REVERSE)]
        case "stale":
            return [Span(fresh.stale_text, tone_style("warn") + REVERSE)]
        case "held":
            held = numbers.clock(fresh.held_at, context.tz)
            ago = numbers.age(fresh.age_seconds or 0.0)
            return [Span(f"AT {held} ({ago} ago)", REVERSE)]
        case "live" | "late":
            tone = toned(fresh.age_text, "warn" if fresh.mark == "late" else "plain")
            return [toned("LIVE", "well"), Span(f" {now} {offset}  "), tone]


def _alarms(context: Context) -> list[Span]:
    seen = context.snapshot.overview
    items = seen.attention if seen else []
    critical = sum(item.severity == "critical" for item in items)
    warn = len(items) - critical
    spans: list[Span] = []
    if critical:
        spans.append(toned(f"{critical} CRIT", "critical"))
    if warn:
        spans.append(toned(f"{' ' if spans else ''}{warn} warn", "warn"))
    return spans


def _second(context: Context, width: int) -> Line:
    spans: list[Span] = []
    used = 0
    for figure in figures(context.snapshot.overview):
        text = _figure(figure)
        if used + cell_len(text) + 2 > width:
            break
        spans.append(Span("  " if used else " "))
        spans.append(toned(text, "warn" if figure.breach else "plain"))
        used += cell_len(text) + 2
    return tuple(spans)


def _figure(figure: Figure) -> str:
    return f"{figure.label} {figure.text}{' !' if figure.breach else ''}"


def joined(path: Sequence[str], more: Sequence[str]) -> list[str]:
    """A path walked further: what already ends the one does not begin the other."""
    same = next(
        k for k in range(len(more), -1, -1) if list(path[len(path) - k :]) == list(more[:k])
    )
    return [*path, *more[same:]]


def crumbs(path: Sequence[str], right: str, width: int) -> Line:
    """The path walked, then filter, counts and window at the right edge."""
    left = " " + " > ".join(map(clean, path))
    room = width - cell_len(right) - 2
    return (toned(fit(left, max(1, room)), "accent"), Span(" "), toned(right, "muted"))


def footer(
    left: Sequence[Key], opens: str, right: Sequence[Key], width: int, message: str = ""
) -> Line:
    """What Enter and the screen's keys do; acting keys in the accent. A message takes its place."""
    if message:
        return (Span(fit(f" {message}", width), tone_style("strong")),)
    spans: list[Span] = [Span(" ")]
    if opens:
        spans.append(Span(f"Enter {opens}  "))
    spans.extend(
        toned(f"{key.shown} {_short(key)}  ", "accent" if key.acts else "plain") for key in left
    )
    tail = "  ".join(f"{key.shown} {_short(key)}" for key in right) + " "
    used = sum(cell_len(span.text) for span in spans)
    while spans and used + cell_len(tail) > width and len(spans) > 2:
        used -= cell_len(spans.pop().text)
    gap = max(0, width - used - cell_len(tail))
    return (*spans, Span(" " * gap), toned(tail, "muted"))


_SHORT = {
    "palette": "go", "filter": "filter", "hold": "hold", "help": "help", "follow": "follow",
    "next_value": "value", "as_table": "table", "window": "window", "edit": "edit", "put": "put",
    "compare": "compare", "next_view": "view", "live": "live", "edit_cache": "edit", "pin": "pin",
    "prefetch": "prefetch", "purge": "purge", "cancel_job": "cancel", "undo_job": "undo",
    "run_doctor": "run the doctor",
}  # fmt: skip


def _short(key: Key) -> str:
    return _SHORT.get(key.does, key.words)


def no_acting(key: Key, *, held: bool) -> str:
    """Why an acting key does nothing, and the way out."""
    if held:
        return f"{key.shown} {_short(key)} acts on now, and this moment is held: = goes back."
    return (
        f"{key.shown} {_short(key)} needs the operator's token ($PERILUNE_TOKEN); you are viewer."
    )


def unanswered(context: Context) -> str:
    """While nothing comes any more: since when, what that means, what to press; else nothing."""
    fresh = context.fresh
    if not fresh.is_stale or fresh.age_seconds is None:
        return ""
    since = numbers.clock(context.server_now - fresh.age_seconds, context.tz)
    return f"No answer since {since}. Gateways go on without it. Ctrl-r tries now, ? help"


def too_small(width: int, height: int) -> str:
    """The only line of a window in which nothing fits."""
    return f"window {width}x{height}, needs {MIN_WIDTH}x{MIN_HEIGHT}"


def help_lines(keys: Sequence[Key], twin: str) -> list[Line]:
    """Every working key by group; the last line is where else to see this."""
    lines: list[Line] = []
    group = ""
    for key in keys:
        if not key.shown:
            continue
        if key.group != group:
            group = key.group
            lines.append(line(toned(f" {group}", "strong")))
        tone: Tone = "accent" if key.acts else "plain"
        lines.append(line(toned(f"   {key.shown:<11}", tone), Span(key.words)))
    lines.append(line(""))
    lines.append(line(toned(f" same view: {twin}", "muted")))
    return lines
