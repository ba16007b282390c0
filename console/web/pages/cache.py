"""Cache views and the transfer pages."""

from __future__ import annotations

from dataclasses import replace

from console.viewmodel import pool, transfers
from console.viewmodel import requests as request_rows
from console.viewmodel.table import Row, Table
from console.web.links import path

from . import figures
from .base import MAX_ROWS, MAX_ROWS_FILTERED, Context, Page
from .cluster import newest_first
from .pool import CACHE_VIEWS, head_of, read_pool

VALUE_LABELS = {"p95": "P95", "bytes": "Bytes", "failures": "Failures"}


async def cache_page(context: Context, view: str) -> Page:
    """`view` is hit-rate or evictions: a figure, and below it the tiers or the health of eviction."""
    heat = await figures.load(context, view)
    report = await read_pool(context)
    data = {
        **await head_of(context, report),
        "heat": heat,
        "source": figures.source_of(view, context.viewer),
        "view_name": view,
        "tiers": pool.tiers(report) if view == "hit-rate" else None,
        "health": pool.health(report) if view == "evictions" else None,
    }
    label = dict(CACHE_VIEWS)[view]
    crumbs = [("Cache", "/cache/hit-rate"), (label, "")]
    return Page("cache.html", label, "cache", crumbs, data, has_figure=True)


async def transfers_page(context: Context) -> Page:
    """The matrix, and its pairs as rows."""
    matrix = await context.client.matrix(figures.MATRIX_WINDOW_SECONDS)
    value = figures.transfer_value(context.viewer)
    names = transfers.VALUES
    data = {
        "heat": await figures.load(context, "transfers"),
        "source": figures.source_of("transfers", context.viewer),
        "pairs": _with_pages(transfers.pair_table(matrix)),
        "value": value,
        "values": [(name, VALUE_LABELS[name]) for name in names],
        "next_value": names[(names.index(value) + 1) % len(names)],
    }
    crumbs = [("Transfers", "")]
    return Page("transfers.html", "Transfers", "transfers", crumbs, data, has_figure=True)


async def pair_page(context: Context, source: str, destination: str) -> Page:
    """One pair's numbers, and the requests that went this way."""
    matrix = await context.client.matrix(figures.MATRIX_WINDOW_SECONDS)
    table = transfers.pair_table(matrix)
    row = next((row for row in table.rows if row.key == f"{source}>{destination}"), None)
    served = await context.client.decisions(worker=destination, limit=MAX_ROWS_FILTERED)
    went = [d for d in served.items if d.prefill_worker == source][:MAX_ROWS]
    shown = request_rows.requests(went[::-1], now=context.now, tz=context.viewer.tz)
    data = {
        "row": row,
        "facts": list(zip(table.columns, row.cells, strict=True)) if row else [],
        "empty": "No KV has travelled between these two in this window.",
        "requests": newest_first(shown, "No recent request went this way."),
    }
    name = f"{source} -> {destination}"
    crumbs = [("Transfers", "/transfers"), (name, "")]
    return Page("pair.html", name, "transfers", crumbs, data)


def _with_pages(table: Table) -> Table:
    """Each pair's row opens the pair's page; the slowest are listed, the matrix has all."""
    return replace(table, rows=tuple(map(_with_page, table.rows[:MAX_ROWS])))


def _with_page(row: Row) -> Row:
    ends = (str(row.facts.get("from")), str(row.facts.get("to")))
    return replace(row, opens=path("transfers", *ends))
