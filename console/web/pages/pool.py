"""Cache views of the pool in full: tiers, tenants, what-if, pins; and the head above all views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from console import calls
from console.viewmodel import curve, jobs, pins, pool
from console.viewmodel.table import Table
from controlplane.nodes.pool_schemas import PoolReport

from .base import Context, Page

CACHE_VIEWS = (
    ("hit-rate", "Hit rate"),
    ("evictions", "Evictions"),
    ("tiers", "Tiers"),
    ("tenants", "Tenants"),
    ("what-if", "What-if"),
    ("pins", "Pins"),
)
MAX_JOBS = 100
Acts = Mapping[str, tuple[tuple[str, str], ...]]
"""By row: (kind, what stands on the button)."""


async def read_pool(context: Context) -> PoolReport:
    """The pool's report for the window of the page."""
    report: PoolReport = await context.client.send(calls.pool(context.viewer.window))
    return report


async def head_of(context: Context, report: PoolReport) -> dict[str, object]:
    """What stands above every view of the cache."""
    found = await context.client.send(calls.jobs(MAX_JOBS))
    return {
        "head": pool.head(report, await context.client.policies()),
        "jobs_now": jobs.running(found.items),
        "num_jobs": sum(jobs.is_live(job) for job in found.items),
        "views": CACHE_VIEWS,
    }


async def pool_page(context: Context, view: str) -> Page:
    """`view` is tiers, tenants, what-if or pins."""
    report = await read_pool(context)
    label = dict(CACHE_VIEWS)[view]
    data = {
        **await head_of(context, report),
        "view_name": view,
        **await _DATA[view](context, report),
    }
    crumbs = [("Cache", "/cache/hit-rate"), (label, "")]
    template = f"cache_{view.replace('-', '_')}.html"
    return Page(template, label, "cache", crumbs, data, has_figure=view == "what-if", has_acts=True)


async def _tiers(context: Context, report: PoolReport) -> dict[str, object]:
    table = pool.tiers(report)
    return {
        "tiers": table,
        "acts": {row.key: (("purge", "Purge node"),) for row in table.rows if row.facts.get("tier") == "dram"},
        "health": pool.health(report),
    }  # fmt: skip


async def _tenants(context: Context, report: PoolReport) -> dict[str, object]:
    table = pool.groups(report)
    return {
        "groups": without(table, "bar"),
        "acts": _group_acts(table),
        "namespaces": pool.namespaces(report),
        "bars": [(row, group) for row, group in zip(table.rows, report.groups, strict=True) if group.fullest is not None],
    }  # fmt: skip


def without(table: Table, key: str) -> Table:
    """A page draws bars of its own beside the table."""
    at = next(place for place, column in enumerate(table.columns) if column.key == key)
    rows = tuple(replace(row, cells=row.cells[:at] + row.cells[at + 1 :]) for row in table.rows)
    return replace(table, columns=table.columns[:at] + table.columns[at + 1 :], rows=rows)


def _group_acts(table: Table) -> Acts:
    buttons = (("pin", "Pin"), ("prefetch", "Prefetch"), ("purge", "Purge"))
    return {row.key: buttons for row in table.rows if not row.facts.get("others")}


async def _what_if(context: Context, report: PoolReport) -> dict[str, object]:
    found = curve.curve(report)
    return {
        "curve": found,
        "points": curve.curve_table(found),
        "health": pool.health(report),
        "source": f"/figures/what-if?window={context.viewer.window}",
    }


async def _pins(context: Context, report: PoolReport) -> dict[str, object]:
    found = await context.client.send(calls.pins())
    table = pins.pins(found, now=context.now, tz=context.viewer.tz)
    return {
        "pins": table,
        "acts": {row.key: (("unpin", "Unpin"),) for row in table.rows},
        "unreachable": [f"{node}: {why}" for node, why in sorted(found.unreachable.items())],
    }


_DATA = {"tiers": _tiers, "tenants": _tenants, "what-if": _what_if, "pins": _pins}
