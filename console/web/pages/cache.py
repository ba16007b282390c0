"""Cache views with a figure: hit rate, evictions."""

from __future__ import annotations

from console.viewmodel import pool

from . import figures
from .base import Context, Page
from .pool import CACHE_VIEWS, head_of, read_pool


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
