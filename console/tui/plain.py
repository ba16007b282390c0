"""The same screens as lines of text: for pipes, cron, TERM=dumb and screen readers."""

from __future__ import annotations

from collections.abc import Callable

from console.tui import details, frame
from console.tui.context import Context
from console.tui.doctor_lines import head_lines as doctor_head_lines
from console.tui.lines import Line, header_line, line, plain_text, row_line, whole_lines
from console.tui.pages.doctor import check_lines
from console.tui.pages.overview import evictions_of, hit_rate_of, service_lines
from console.tui.pool_lines import pool_head_lines
from console.tui.request_lines import (
    health_head_lines,
    ledger_head_lines,
    running_head_lines,
)
from console.tui.widgets.heatmap import worst_table
from console.viewmodel import (
    audit,
    cache,
    curve,
    doctor,
    jobs,
    ledger,
    node_pair,
    policies,
    pool,
    requests,
    running,
    topology,
    transfers,
    worker_health,
)
from console.viewmodel.heatmap import Heatmap
from console.viewmodel.overview import overview
from console.viewmodel.table import Table

WORST_CELLS = 10
_TALL = 1000


def screen_text(context: Context, noun: str, name: str = "", actor: str = "") -> str:
    """Header, then one screen; figures become tables of their worst cells."""
    lines = frame.header(context, context.width, actor)
    if context.loading:
        lines.append(line(context.loading))
    elif noun in _DETAILS:
        lines.extend(_DETAILS[noun](context, name, context.width))
    else:
        lines.extend(_SCREENS[noun](context))
    return "\n".join(plain_text(one) for one in lines)


def screens() -> tuple[str, ...]:
    """What can be asked for."""
    return tuple(_SCREENS)


def _table(context: Context, title: str, table: Table) -> list[Line]:
    lines = [line(""), line(f" {title}")]
    if not table.rows:
        return [*lines, line(f" {table.empty}")]
    width = context.width - 1
    rows = [row_line(table, row, width) for row in table.rows]
    return [*lines, line(" ", *header_line(table, width)), *(line(" ", *row) for row in rows)]


def _figure(context: Context, heatmap: Heatmap) -> list[Line]:
    lines = _table(
        context, f"{heatmap.title}; worst {WORST_CELLS}", worst_table(heatmap, WORST_CELLS)
    )
    return [*lines, line(f" {heatmap.verdict}")] if heatmap.verdict else lines


def _overview(context: Context) -> list[Line]:
    view = overview(context.snapshot, context.history, now=context.server_now, tz=context.tz)
    lines = [line(""), *service_lines(context, view, context.width)]
    lines.extend(whole_lines(view.attention, context.width - 1))
    lines.append(line(""))
    lines.extend(whole_lines(view.changes, context.width - 1))
    return lines


def _topology(context: Context) -> list[Line]:
    pairs = topology.pairings(context.snapshot.decisions, now=context.server_now)
    return [
        *_table(context, "NODES", topology.nodes(context.snapshot, now=context.now)),
        *_table(context, "WORKERS", topology.workers(context.snapshot)),
        *_table(context, "PAIRINGS, last 5 min", pairs),
        line(""),
        *health_head_lines(context, context.width)[:-1],
        *_table(
            context,
            "WORKERS AS GATEWAYS MEET THEM, worst first",
            worker_health.worker_health(context.snapshot.gateways),
        ),
    ]


def _cache(context: Context) -> list[Line]:
    return [
        *_figure(context, hit_rate_of(context, 90)),
        *_figure(context, evictions_of(context, 90)),
        *_pool(context),
    ]


def _pool(context: Context) -> list[Line]:
    """Policy, tiers, tenants, health and the curve's numbers; without a report the slabs alone."""
    report = context.snapshot.pool
    if report is None:
        return _table(context, "POOL", cache.tiers(context.snapshot.nodes))
    found = curve.curve(report)
    what_if = f"WHAT IF, hit rate at other capacities; measured now {found.measured_text}"
    return [
        line(""),
        *pool_head_lines(context),
        *_table(context, "TIERS", pool.tiers(report)),
        *_table(context, "TENANTS AND NAMESPACES", pool.groups(report)),
        *_table(context, "HEALTH OF EVICTION, 15 min", pool.health(report)),
        *_table(context, what_if, curve.curve_table(found)),
        line(f" {found.verdict}"),
    ]


def _jobs(context: Context) -> list[Line]:
    table = jobs.jobs(context.snapshot.jobs, now=context.server_now, tz=context.tz)
    return _table(context, "JOBS, newest first", table)


def _transfers(context: Context) -> list[Line]:
    """Alarms, the pairs of nodes where there are several, the pairs of workers."""
    snapshot = context.snapshot
    lines = [line(f" {text.text}") for text in node_pair.alarms(snapshot.alarms)]
    several = transfers.first_view(snapshot.nodes) == "nodes"
    for view in transfers.VIEWS if several else ("workers",):
        heatmap = transfers.transfers(
            snapshot.matrix, view=view, workers=snapshot.workers, nodes=snapshot.nodes
        )
        title = f"{view.upper()}, {heatmap.title}"
        lines.extend(_table(context, title, transfers.pair_table(snapshot.matrix, view)))
        lines.extend([line(f" {heatmap.verdict}")] if heatmap.verdict else [])
    return lines


def _doctor(context: Context) -> list[Line]:
    """How the last run went, what to mend, then all checks."""
    report = context.snapshot.doctor
    lines = [line(""), *doctor_head_lines(context)]
    if not doctor.groups(report, "findings"):
        return lines
    for row in doctor.checks(report, "findings").rows:
        lines.extend([*check_lines(row, context.width), line("")])
    for view in ("nodes", "pairs"):
        lines.extend(_table(context, view.upper(), doctor.checks(report, view)))
    return lines


def _requests(context: Context) -> list[Line]:
    table = requests.requests(context.snapshot.decisions, now=context.server_now, tz=context.tz)
    return _table(context, "REQUESTS, newest last", table)


def _in_flight(context: Context) -> list[Line]:
    return [
        line(""),
        *running_head_lines(context, context.width)[:-1],
        *_table(
            context,
            "IN FLIGHT, nearest to its bound first",
            running.running(context.snapshot.running),
        ),
    ]


def _rejections(context: Context) -> list[Line]:
    report = context.snapshot.ledger
    entries = report.page.items if report else []
    table = ledger.ledger(entries, now=context.server_now, tz=context.tz)
    return [
        line(""),
        *ledger_head_lines(context, context.width, _TALL)[:-1],
        *_table(context, "REJECTIONS AND PROBES, newest first", table),
    ]


def _policies(context: Context) -> list[Line]:
    found = context.snapshot.policies
    table = policies.policies(found, now=context.server_now, tz=context.tz)
    lines = _table(context, "POLICIES", table)
    for policy in found:
        name = f"{policy.kind}/{policy.scope}"
        lines.extend([line(""), *details.policy_lines(context, name, context.width)])
    return lines


def _audit(context: Context) -> list[Line]:
    table = audit.audit(context.snapshot.audit, now=context.server_now, tz=context.tz)
    return _table(context, "AUDIT, newest first", table)


_SCREENS: dict[str, Callable[[Context], list[Line]]] = {
    "overview": _overview,
    "topology": _topology,
    "cache": _cache,
    "transfers": _transfers,
    "requests": _requests,
    "policies": _policies,
    "jobs": _jobs,
    "doctor": _doctor,
    "audit": _audit,
    "in-flight": _in_flight,
    "rejections": _rejections,
}
_DETAILS: dict[str, Callable[[Context, str, int], list[Line]]] = {
    "node": details.node_lines,
    "worker": details.worker_lines,
    "gateway": details.gateway_lines,
    "request": details.request_lines,
    "pair": details.pair_lines,
    "policy": details.policy_lines,
    "job": details.job_lines,
}
