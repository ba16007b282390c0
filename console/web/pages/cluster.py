"""Overview, topology, one node, one worker."""

from __future__ import annotations

from dataclasses import replace

from console.viewmodel import cache, overview, requests, topology, worker_health
from console.viewmodel.history import History
from console.viewmodel.table import Table
from console.web.links import path
from controlplane.client_http import ClientError
from controlplane.schema_base import Problem

from . import figures
from .base import MAX_ROWS, MONOTONIC_NOW, Context, Page, curl_of, filtered

SPARK_METRICS = (
    "requests,rejected,ttft_p95_seconds,tbt_p95_seconds,queue_p95_seconds,hit_tokens,"
    "prompt_tokens,kv_wait_seconds,decode_seconds,slo_met,slo_missed"
)


async def overview_page(context: Context) -> Page:
    """Is it fine, what is not, what changed."""
    history = History()
    history.load(await context.client.series(SPARK_METRICS, "cluster", 900, 10))
    view = overview.overview(context.snapshot, history, now=context.now, tz=context.viewer.tz)
    return Page(
        "overview.html",
        "Overview",
        "overview",
        [("Overview", "")],
        {"view": view, "curl": await curl_of(context) if view.empty else ""},
    )


async def topology_page(context: Context) -> Page:
    """Nodes, workers, pairings."""
    snapshot, viewer = context.snapshot, context.viewer
    recent = await context.client.decisions(limit=200)
    gateways = await context.client.gateways()
    met = worker_health.worker_health(gateways)
    nodes = filtered(topology.nodes(snapshot, now=MONOTONIC_NOW), viewer, topology.FIELDS)
    workers = filtered(topology.workers(snapshot), viewer, topology.FIELDS)
    shown = {"nodes": nodes.count, "workers": workers.count} if viewer.filter else {}
    data = {
        "nodes": nodes.table,
        "workers": workers.table,
        "pairings": topology.pairings(recent.items, now=context.now),
        "met": replace(met, rows=met.rows[:MAX_ROWS]),
        "met_more": max(0, len(met.rows) - MAX_ROWS),
        "met_head": worker_health.head(gateways),
        "filter_error": nodes.error,
        "counts": {name: f", {shown[name]}" if shown else "" for name in ("nodes", "workers")},
    }
    return Page(
        "topology.html",
        "Topology",
        "topology",
        [("Topology", "")],
        data,
    )


async def node_page(context: Context, node_id: str) -> Page:
    """Every field of one node, its workers, its hit rate."""
    snapshot, viewer = context.snapshot, context.viewer
    facts = topology.describe_node(snapshot, node_id, now=MONOTONIC_NOW, tz=viewer.tz)
    if not facts:
        raise _unknown("node", node_id, [node.id for node in snapshot.nodes])
    workers = topology.workers(snapshot)
    own = [row for row in workers.rows if row.facts.get("node") == node_id]
    tiers = cache.tiers([node for node in snapshot.nodes if node.id == node_id])
    heat = await figures.load(context, "hit-rate", node_id)
    data = {
        "facts": facts,
        "tiers": tiers,
        "workers": replace(workers, rows=tuple(own), empty="No worker runs on this node."),
        "heat": heat,
        "source": figures.source_of("hit-rate", viewer, node=node_id),
    }
    crumbs = [("Topology", "/topology"), (node_id, "")]
    return Page("node.html", node_id, "topology", crumbs, data, has_figure=True)


async def worker_page(context: Context, worker_id: str) -> Page:
    """One worker process and what it served last."""
    table = topology.workers(context.snapshot)
    row = next((row for row in table.rows if row.key == worker_id), None)
    if row is None:
        raise _unknown("worker", worker_id, [row.key for row in table.rows])
    recent = await context.client.decisions(worker=worker_id, limit=MAX_ROWS)
    served = requests.requests(recent.items[::-1], now=context.now, tz=context.viewer.tz)
    gateways = await context.client.gateways()
    data = {
        "row": row,
        "met": worker_health.worker_health(gateways, worker_id),
        "facts": list(zip(table.columns, row.cells, strict=True)),
        "requests": newest_first(served, "This worker has served no request yet."),
    }
    node = str(row.facts.get("node") or "")
    crumbs = [("Topology", "/topology"), (node, path("nodes", node)), (worker_id, "")]
    return Page("worker.html", worker_id, "topology", crumbs, data)


def newest_first(table: Table, empty: str = "") -> Table:
    """The terminal's tail reads downwards; a page begins with the newest."""
    return replace(table, rows=table.rows[::-1], empty=empty or table.empty)


def _unknown(noun: str, name: str, known: list[str]) -> ClientError:
    there = ", ".join(known[:10]) or "none yet"
    return ClientError(
        Problem(
            title=f"No {noun} {name}",
            status=404,
            detail=f"The control plane knows no {noun} {name}.",
            field=noun,
            value=name,
            way_out=f"Known: {there}. It may have been removed; Topology lists all.",
        )
    )
