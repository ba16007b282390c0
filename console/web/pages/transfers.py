"""The transfer matrices, and one pair of nodes or of workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from console.viewmodel import acts, doctor, node_pair, transfers
from console.viewmodel import requests as request_rows
from console.viewmodel.table import Table
from controlplane.doctor import calls as doctor_calls
from controlplane.doctor.schemas import DoctorReport
from controlplane.stats.schemas import Matrix
from controlplane.transfers import calls as transfer_calls
from controlplane.transfers.schemas import NodeTransferList

from . import figures
from .base import MAX_ROWS, MAX_ROWS_FILTERED, Context, Page
from .cluster import newest_first

MAX_PAIR_REQUESTS = 20
VALUE_LABELS = {"p99": "P99", "p95": "P95", "bytes": "Bytes", "failures": "Failures"}
VIEW_LABELS = {"nodes": "Nodes", "workers": "Workers"}


async def transfers_page(context: Context) -> Page:
    """A matrix, and its pairs as rows; paths that carry nothing above it."""
    viewer = context.viewer
    matrix = await context.client.matrix(figures.MATRIX_WINDOW_SECONDS)
    found: NodeTransferList = await context.client.send(transfer_calls.nodes(limit=0, links=False))
    view = figures.transfer_view(context)
    values = transfers.VALUES_OF[view]
    value = figures.transfer_value(viewer, view)
    name = figures.TRANSFER_FIGURES[view]
    data = {
        "alarms": node_pair.alarms(found),
        "heat": await figures.load(context, name),
        "source": figures.source_of(name, viewer),
        "pairs": _first_rows(transfers.pair_table(matrix, view)),
        "view_name": view,
        "views": [(one, VIEW_LABELS[one]) for one in transfers.VIEWS],
        "value": value,
        "values": [(one, VALUE_LABELS[one]) for one in values],
        "next_value": values[(values.index(value) + 1) % len(values)],
    }
    crumbs = [("Transfers", "")]
    return Page("transfers.html", "Transfers", "transfers", crumbs, data, has_figure=True)


async def pair_page(context: Context, source: str, destination: str) -> Page:
    """One pair's numbers, and the requests that went this way."""
    matrix = await context.client.matrix(figures.MATRIX_WINDOW_SECONDS)
    if transfers.is_node_pair(source, destination, matrix, context.snapshot.nodes):
        return await _node_pair_page(context, source, destination, matrix)
    table = transfers.pair_table(matrix)
    row = next((row for row in table.rows if row.key == f"{source}>{destination}"), None)
    data = {
        "row": row,
        "facts": list(zip(table.columns, row.cells, strict=True)) if row else [],
        "empty": "No KV has travelled between these two in this window.",
        "requests": await _requests(context, {source}, {destination}),
    }
    return _page("pair.html", f"{source} -> {destination}", data)


async def _node_pair_page(context: Context, source: str, destination: str, matrix: Matrix) -> Page:
    found: NodeTransferList = await context.client.send(transfer_calls.nodes(source, destination))
    report: DoctorReport = await context.client.send(doctor_calls.last())
    snapshot = context.snapshot
    view = node_pair.node_pair(source, destination, found, matrix=matrix, nodes=snapshot.nodes)
    run = doctor.head(report, now=context.now, tz=context.viewer.tz, nodes=snapshot.nodes)
    data = {
        "pair": view,
        "letters": [(letter, dict(node_pair.STAGES)[name]) for name, letter in node_pair.LETTERS.items()],
        "shares": [(row.key, node_pair.shares(one)) for row, one in zip(view.kinds.rows, node_pair.kinds_of(source, destination, found), strict=True)],
        "checks": doctor.of_pair(report, source, destination),
        "run": run,
        "running": doctor.is_running(report),
        "can_probe": source != destination,
        "requests": await _requests(
            context,
            {w.id for w in snapshot.workers if w.node_id == source},
            {w.id for w in snapshot.workers if w.node_id == destination},
        ),
    }  # fmt: skip
    return _page("node_pair.html", view.name, data, has_acts=True)


def _page(template: str, name: str, data: Mapping[str, object], *, has_acts: bool = False) -> Page:
    crumbs = [("Transfers", "/transfers"), (name, "")]
    return Page(template, name, "transfers", crumbs, data, has_acts=has_acts)


async def _requests(context: Context, prefill: set[str], decode: set[str]) -> Table:
    """The last requests that went from one of these to one of those, newest first."""
    worker = next(iter(decode)) if len(decode) == 1 else None
    limit = MAX_ROWS_FILTERED if worker else 2 * MAX_ROWS
    served = await context.client.decisions(worker=worker, limit=limit)
    went = [
        one for one in served.items if one.prefill_worker in prefill and one.decode_worker in decode
    ][:MAX_PAIR_REQUESTS]
    shown = request_rows.requests(went[::-1], now=context.now, tz=context.viewer.tz)
    return newest_first(shown, "No recent request went this way.")


def _first_rows(table: Table) -> Table:
    """The slowest are listed, the matrix has all."""
    return replace(table, rows=table.rows[:MAX_ROWS])


async def probe_of(context: Context, target: str) -> acts.Act | str:
    """Of the doctor: `all`, or `pair/n1>n2`."""
    report: DoctorReport = await context.client.send(doctor_calls.last())
    num_nodes = len(context.snapshot.nodes)
    if not target.startswith("pair/"):
        return acts.run_doctor(report, num_nodes)
    source, _, destination = target.removeprefix("pair/").partition(">")
    known = {node.id for node in context.snapshot.nodes}
    if not {source, destination} <= known or source == destination:
        return f"{source} and {destination} are no two nodes of this cluster."
    return acts.run_doctor(report, num_nodes, pair=(source, destination))
