"""One thing in full, as lines: for its own screen, the pane beside a list, and plain text."""

from __future__ import annotations

from textwrap import wrap

from rich.style import Style

from console.tui.caps import tone_style
from console.tui.context import Context
from console.tui.lines import Line, Span, fit, line, table_lines, toned, whole_lines
from console.tui.pair_lines import node_pair_lines
from console.viewmodel import jobs, numbers, requests, topology, transfers, worker_health
from console.viewmodel.audit import change
from console.viewmodel.requests import Bar, RequestView
from console.viewmodel.spec_text import show
from console.viewmodel.table import Row, Text, Tone, cell, clean
from controlplane.fleet.schemas import Worker


def node_lines(context: Context, node_id: str, width: int) -> list[Line]:
    """A node's fields, then its workers."""
    rows = topology.describe_node(context.snapshot, node_id, now=context.now, tz=context.tz)
    if not rows:
        return [
            line(toned(f" No node {clean(node_id)} is known any more. Esc goes back.", "muted"))
        ]
    lines = [line(toned(f" node {clean(node_id)}", "strong")), *field_lines(rows, width), line("")]
    own = [worker for worker in context.snapshot.workers if worker.node_id == node_id]
    for worker in own:
        lines.extend(worker_lines(context, worker.id, width))
        lines.append(line(""))
    return lines


def worker_lines(context: Context, worker_id: str, width: int) -> list[Line]:
    """A worker's fields."""
    worker = next((w for w in context.snapshot.workers if w.id == worker_id), None)
    if worker is None:
        return [
            line(toned(f" No worker {clean(worker_id)} is known any more. Esc goes back.", "muted"))
        ]
    started = worker.started_at
    fields = (
        ("role", f"{worker.role} on {worker.node_id}, engine {worker.engine}"),
        ("model", worker.model),
        ("requests", f"{numbers.count(worker.running)} running, {numbers.count(worker.waiting)} waiting"
         f", at most {numbers.count(worker.max_concurrent_requests)}"),
        ("restarts", numbers.count(worker.restarts)),
        ("started", numbers.UNKNOWN if started is None else numbers.stamp(started, context.server_now, context.tz)),
        ("memory", f"{numbers.stored_bytes(worker.rss_bytes)} resident, pid {worker.pid or numbers.UNKNOWN}"),
        ("block", f"{numbers.count(worker.block_tokens)} tokens"),
        ("namespace", (worker.namespace or numbers.UNKNOWN)[:32]),
        ("url", worker.url),
        ("log", worker.log_file or numbers.UNKNOWN),
        ("requests meet", _data_path(worker)),
        ("last error", worker.last_error or "none"),
    )  # fmt: skip
    state = Row("state", (Text("state", "muted"), topology.worker_state(worker)))
    named = (Row(name, (Text(name, "muted"), cell(value))) for name, value in fields)
    rows = (state, *named)
    met = worker_health.worker_health(context.snapshot.gateways, worker_id)
    lines = [line(toned(f" worker {clean(worker_id)}", "strong")), *field_lines(rows, width)]
    if met.rows:
        lines.extend([line(""), line(toned(" AS GATEWAYS MEET IT", "strong"))])
        lines.extend(line(" ", *row) for row in whole_lines(met, width - 2))
    return lines


def _data_path(worker: Worker) -> str:
    """`ejected: probe ok, requests failing: answered 503`."""
    state = worker.data_path or numbers.UNKNOWN
    return f"{state}: {worker.data_path_note}" if worker.data_path_note else state


def gateway_lines(context: Context, gateway_id: str, width: int) -> list[Line]:
    """A gateway's fields, as it last reported."""
    found = next((g for g in context.snapshot.gateways if g.id == gateway_id), None)
    if found is None:
        return [line(toned(f" No gateway {clean(gateway_id)} is known. Esc goes back.", "muted"))]
    stats = found.stats
    fields = [
        ("state", f"{found.state}, heard {numbers.age(found.age_seconds)} ago"),
        ("url", found.url),
        ("pid", str(found.pid)),
        ("view", f"revision {numbers.count(found.view_revision)}"),
    ]
    if stats is not None:
        fields += [
            ("requests", f"{numbers.count(stats.requests_total)} since its start"),
            ("in flight", numbers.count(stats.in_flight)),
            ("rejected", numbers.count(stats.rejected_total)),
            (
                "failed",
                f"{numbers.count(stats.failed_total)}, cancelled {numbers.count(stats.cancelled_total)}",
            ),
            ("client errors", numbers.count(stats.client_errors_total)),
            ("prefix index", f"{numbers.count(stats.index_blocks)} blocks"),
            ("memory", f"{numbers.stored_bytes(stats.rss_bytes)} resident"),
        ]
    rows = tuple(Row(name, (Text(name, "muted"), cell(value))) for name, value in fields)
    return [line(toned(f" gateway {clean(gateway_id)}", "strong")), *field_lines(rows, width)]


def job_lines(context: Context, name: str, width: int) -> list[Line]:
    """A job's fields, result and what was asked."""
    found = next((job for job in context.snapshot.jobs if str(job.id) == name), None)
    if found is None:
        return [line(toned(f" Job {clean(name)} is not among the newest. Esc goes back.", "muted"))]
    rows = jobs.describe(found, now=context.server_now, tz=context.tz)
    title = f" job {found.id}  {found.kind} {clean(found.target)}"
    return [line(toned(title, "strong")), *field_lines(rows, width)]


def pair_lines(context: Context, name: str, width: int) -> list[Line]:
    """A pair's numbers, then what it handed over last; of nodes all that their agents say."""
    source, _, target = name.partition("/")
    snapshot = context.snapshot
    if transfers.is_node_pair(source, target, snapshot.matrix, snapshot.nodes):
        return node_pair_lines(context, source, target, width)
    table = transfers.pair_table(context.snapshot.matrix)
    row = next((row for row in table.rows if row.key == f"{source}>{target}"), None)
    lines = [line(toned(f" {clean(source)} -> {clean(target)}, last 5 min", "strong"))]
    if row is None:
        lines.append(line(toned(" No KV has travelled between these two.", "muted")))
    else:
        named = zip(table.columns[1:], row.cells[1:], strict=True)
        facts = [Row(c.key, (Text(c.label.lower(), "muted"), value)) for c, value in named]
        lines.extend(field_lines(tuple(facts), width))
    lines.extend((line(""), line(toned(" LAST REQUESTS OF THE PAIR, newest first", "strong"))))
    last = transfers.handovers(context.snapshot.decisions, source, target, tz=context.tz)
    return [*lines, *(line(" ", *row) for row in table_lines(last, width - 2))]


def audit_lines(context: Context, row_id: str, width: int) -> list[Line]:
    """One audit row, unshortened."""
    row = next((r for r in context.snapshot.audit if str(r.id) == row_id), None)
    if row is None:
        return [
            line(toned(f" No audit row {clean(row_id)} is shown any more. Esc goes back.", "muted"))
        ]
    fields = (
        ("time", row.at.astimezone(context.tz).strftime("%Y-%m-%d %H:%M:%S")),
        ("actor", row.actor),
        ("verb", row.verb),
        ("target", row.target),
        ("change", change(row.before, row.after)),
        ("reason", row.reason or numbers.NO_TRAFFIC),
        ("result", row.result),
        ("request id", row.request_id or numbers.NO_TRAFFIC),
        ("before", row.before or numbers.NO_TRAFFIC),
        ("after", row.after or numbers.NO_TRAFFIC),
    )
    rows = tuple(Row(name, (Text(name, "muted"), cell(value))) for name, value in fields)
    return [line(toned(f" audit row {row.id}", "strong")), *field_lines(rows, width)]


def policy_lines(context: Context, name: str, width: int) -> list[Line]:
    """The active revision's spec."""
    kind, _, scope = name.partition("/")
    found = next((p for p in context.snapshot.policies if (p.kind, p.scope) == (kind, scope)), None)
    if found is None:
        return [line(toned(f" No policy {clean(name)} is active. Esc goes back.", "muted"))]
    since = numbers.stamp(found.created_at, context.server_now, context.tz)
    head = f" {clean(name)}   r{found.revision} active since {since} by {clean(found.author)}"
    rows = tuple(
        Row(key, (Text(key, "muted"), cell(show(value)))) for key, value in found.spec.items()
    )
    reason = clean(found.reason) or "no reason given"
    return [
        line(toned(head, "strong")),
        line(toned(f" {reason}", "muted")),
        *field_lines(rows, width),
    ]


def request_lines(context: Context, request_id: str, width: int) -> list[Line]:
    """What came of it and why, waterfall, decision, legs."""
    found = context.snapshot.decision(request_id)
    if found is None:
        if not context.snapshot.is_unrecorded(request_id):
            return [line(toned(f" Reading request {clean(request_id)}.", "muted"))]
        return wrapped(" ", Text(requests.unrecorded(request_id), "muted"), width)
    view = requests.request(found, now=context.server_now, tz=context.tz)
    lines = [part for text in view.head for part in wrapped(" ", text, width)]
    lines.append(line(""))
    lines.extend(wrapped(" OUTCOME  ", view.outcome, width))
    for remark in view.remarks:
        lines.extend(wrapped(" ", remark, width))
    lines.append(line(""))
    lines.extend(waterfall_lines(view, width, ascii_only=context.caps.ascii_only))
    lines.append(line(""))
    lines.extend(wrapped(" ", Text(view.context, "strong"), width))
    for table in (view.prefill, view.decode, view.legs):
        lines.extend(line("  ", *row) for row in whole_lines(table, width - 3))
    return lines


def wrapped(lead: str, text: Text, width: int) -> list[Line]:
    """A long sentence under its own start."""
    parts = wrap(text.text, max(10, width - len(lead) - 1)) or [""]
    leads = [lead, *([" " * len(lead)] * (len(parts) - 1))]
    return [
        line(toned(head, "strong"), Text(part, text.tone))
        for head, part in zip(leads, parts, strict=True)
    ]


def waterfall_lines(view: RequestView, width: int, *, ascii_only: bool) -> list[Line]:
    """`queue  41 ms  44.2 ms  ===`: bars on one scale, from arrival to the last phase's end."""
    if not view.bars:
        return [line(toned(f" {view.no_bars}", "muted"))]
    names = min(20, max(len(bar.name) for bar in view.bars))
    room = max(10, min(60, width - names - 28))
    head = f" {'':<{names}}  {'predicted':>10}  {'measured':>10}  0{'':<{max(0, room - len(view.total) - 1)}}{view.total}"
    lines = [line(toned(head, "muted"))]
    notes = width - names - 28 - room
    for bar in view.bars:
        lines.append(_bar_line(bar, names, room, notes, ascii_only=ascii_only))
        if bar.note and notes < len(bar.note) + 2:
            lines.append(line(" " * (names + 27), toned(fit(bar.note, room), "muted")))
    return lines


def _bar_line(bar: Bar, names: int, room: int, notes: int, *, ascii_only: bool) -> Line:
    tone: Tone = "warn" if bar.slow else "plain"
    measured = bar.measured + ("!" if bar.slow else "")
    text = f" {fit(bar.name, names)}  {bar.predicted:>10}  {measured:>10}  "
    if bar.start is None or bar.end is None:
        return line(
            toned(text, tone), toned(bar.note if notes > len(bar.note) + 1 else "", "muted")
        )
    start = min(room - 1, int(bar.start * room))
    length = max(1, min(room - start, round((bar.end - bar.start) * room)))
    block = ("=" if ascii_only else "█") * length
    note = f"  {bar.note}" if bar.note and notes >= len(bar.note) + 2 else ""
    style = tone_style("warn" if bar.slow else "accent")
    pad = " " * (room - start - length)
    return (
        toned(text, tone),
        Span(" " * start, Style()),
        Span(block, style),
        toned(pad + note, "muted"),
    )


def field_lines(rows: tuple[Row, ...], width: int) -> list[Line]:
    """Name and value; long values wrap under themselves."""
    names = max((len(row.cells[0].text) for row in rows), default=0)
    room = max(10, width - names - 4)
    lines: list[Line] = []
    for row in rows:
        name, value = row.cells[0], row.cells[1]
        for place, part in enumerate(wrap(value.text, room) or [""]):
            label = name.text if place == 0 else ""
            lines.append(line(toned(f" {label:<{names}}  ", "muted"), Text(part, value.tone)))
    return lines
