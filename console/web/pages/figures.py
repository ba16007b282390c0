"""The heatmaps, for pages, for plotly.js and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import urlencode

from console.viewmodel import cache, marks, transfers
from console.viewmodel.cache import TimeAxis
from console.viewmodel.heatmap import Cell, HeatColumn, Heatmap, HeatRow
from console.viewmodel.history import bucket_for
from console.viewmodel.transfers import TransferValue, View
from console.web.viewer import Viewer
from controlplane.stats.schemas import SeriesReply

from .base import Context

NUM_COLUMNS = 90
MAX_AUDIT_ROWS = 200
FINEST_STEP_SECONDS = 10
MATRIX_WINDOW_SECONDS = 300
EVICTION_METRICS = ",".join(metric for metric, _ in cache.EVICTION_REASONS)

CSV_NAMES: dict[str, tuple[str, str, str]] = {
    "hit_rate": ("hit_ratio", "hit_tokens", "prompt_tokens"),
    "evictions": ("evicted_blocks_per_second", "evicted_blocks", "seconds"),
    "node_transfers_p99": ("p99_seconds", "moved_bytes", "transfers"),
    "node_transfers_bytes": ("moved_bytes_per_second", "moved_bytes", "transfers"),
    "node_transfers_failures": ("missing_pieces_per_minute", "moved_bytes", "transfers"),
    "transfers_p95": ("p95_seconds", "moved_bytes", "transfers"),
    "transfers_bytes": ("moved_bytes_per_second", "moved_bytes", "transfers"),
    "transfers_failures": ("failures_per_minute", "moved_bytes", "transfers"),
}
"""Names of value, numerator and denominator: base units, the unit in the name."""


async def load(context: Context, name: str, part: str = "") -> Heatmap:
    """The figure `name`; `part` is a node of hit-rate. Read anew at most once a second."""
    viewer = context.viewer
    view = VIEW_OF.get(name)
    part = transfer_value(viewer, view) if view else part
    key = f"{name} {part} {viewer.window} {viewer.tz}"
    drawn = context.memory.fresh(key, context.now)
    if drawn is None:
        drawn = await FIGURES[name](context, part, context.memory.last(key))
        context.memory.put(key, drawn, context.now)
    return drawn


async def _hit_rate(context: Context, node_id: str, previous: Heatmap | None) -> Heatmap:
    """Node x time; one node's row alone on its own page."""
    source = f"node:{node_id}" if node_id else "cluster,node:*"
    series = await _series(context, "prompt_tokens,hit_tokens", source)
    nodes = [n for n in context.snapshot.nodes if not node_id or n.id == node_id]
    workers = context.snapshot.workers
    return cache.hit_rate(series, nodes, _axis(context), workers=workers, previous=previous)


async def _evictions(context: Context, part: str, previous: Heatmap | None) -> Heatmap:
    """Reason x time over all nodes."""
    series = await _series(context, EVICTION_METRICS, "node:*")
    return cache.evictions(series, _axis(context), previous=previous)


async def _worker_transfers(context: Context, part: str, previous: Heatmap | None) -> Heatmap:
    """Source x destination, of workers."""
    return await _transfers(context, "workers", previous)


async def _node_transfers(context: Context, part: str, previous: Heatmap | None) -> Heatmap:
    """Source x destination, of nodes."""
    return await _transfers(context, "nodes", previous)


async def _transfers(context: Context, view: View, previous: Heatmap | None) -> Heatmap:
    matrix = await context.client.matrix(MATRIX_WINDOW_SECONDS)
    snapshot = context.snapshot
    return transfers.transfers(
        matrix,
        view=view,
        workers=snapshot.workers,
        nodes=snapshot.nodes,
        value=transfer_value(context.viewer, view),
        previous=previous,
    )


def transfer_view(context: Context) -> View:
    """`?view=`; without one, nodes where there are several."""
    chosen = next((view for view in transfers.VIEWS if view == context.viewer.view), None)
    return chosen or transfers.first_view(context.snapshot.nodes)


def transfer_value(viewer: Viewer, view: View) -> TransferValue:
    """What the matrix shows; anything unknown is its first value."""
    values = transfers.VALUES_OF[view]
    return next((value for value in values if value == viewer.value), values[0])


async def events(context: Context, heatmap: Heatmap) -> dict[str, str]:
    """Column key to its letter: what happened under a figure over time."""
    if heatmap.axis != "time":
        return {}
    found = await context.client.audit(limit=MAX_AUDIT_ROWS)
    return marks.events_of(heatmap.columns, replace(context.snapshot, audit=tuple(found.items)))


Load = Callable[[Context, str, Heatmap | None], Awaitable[Heatmap]]
FIGURES: dict[str, Load] = {
    "hit-rate": _hit_rate,
    "evictions": _evictions,
    "transfers": _worker_transfers,
    "node-transfers": _node_transfers,
}
TRANSFER_FIGURES: dict[View, str] = {"nodes": "node-transfers", "workers": "transfers"}
VIEW_OF: dict[str, View] = {name: view for view, name in TRANSFER_FIGURES.items()}


def source_of(name: str, viewer: Viewer, **more: str) -> str:
    """Address that a page's figure, and its CSV, come from."""
    query = {"window": str(viewer.window), "value": viewer.value, **more}
    return f"/figures/{name}?{urlencode({k: v for k, v in query.items() if v})}"


def to_csv(heatmap: Heatmap) -> str:
    """One line a cell, raw numbers; a cell without a value keeps its state."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    matrix = heatmap.axis == "matrix"
    place = ["source", "destination"] if matrix else ["row", "start", "end"]
    lines.writerow([*place, *CSV_NAMES[heatmap.name], "state"])
    for row in heatmap.rows:
        for column, cell in zip(heatmap.columns, row.cells, strict=True):
            lines.writerow([*_place(row, column, matrix=matrix), *_numbers(cell), cell.state])
    return out.getvalue()


def _place(row: HeatRow, column: HeatColumn, *, matrix: bool) -> list[str]:
    return [row.key, column.key] if matrix else [row.key, _utc(column.start), _utc(column.end)]


def _numbers(cell: Cell) -> list[str]:
    return [
        "" if value is None else f"{value:.10g}"
        for value in (cell.value, cell.numerator, cell.denominator)
    ]


def _utc(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def csv_name(context: Context, name: str) -> str:
    """The file says which cluster, when, and whether its numbers are emulated."""
    seen = context.snapshot.overview
    when = datetime.fromtimestamp(context.now, UTC).strftime("%Y%m%dT%H%M%SZ")
    emulated = "-EMULATED" if context.snapshot.emulated else ""
    cluster = "".join(c if c.isalnum() or c in "-_" else "_" for c in seen.cluster) if seen else ""
    return f"perilune-{cluster}-{name}-{when}{emulated}.csv"


def _axis(context: Context) -> TimeAxis:
    return TimeAxis(context.now, context.viewer.tz, float(context.viewer.window), NUM_COLUMNS)


async def _series(context: Context, metrics: str, source: str) -> SeriesReply:
    window = context.viewer.window
    step = max(FINEST_STEP_SECONDS, bucket_for(window, NUM_COLUMNS))
    return await context.client.series(metrics, source, window, step)
