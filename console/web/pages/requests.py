"""The live list, rejections, one request opened."""

from __future__ import annotations

from console.viewmodel import numbers, requests

from .base import MAX_ROWS, MAX_ROWS_FILTERED, Context, Page, curl_of, filtered
from .cluster import newest_first

VIEWS = (("/requests", "Live"), ("/rejections", "Rejections"))


async def requests_page(context: Context) -> Page:
    """Newest first, a page of rows at a time."""
    return await _list_page(context, "Requests", rejected_only=False)


async def rejections_page(context: Context) -> Page:
    """429 by admission."""
    return await _list_page(context, "Rejections", rejected_only=True)


async def _list_page(context: Context, title: str, *, rejected_only: bool) -> Page:
    viewer = context.viewer
    limit = MAX_ROWS_FILTERED if viewer.filter else MAX_ROWS
    cursor = viewer.cursor or None
    if rejected_only:
        found = await context.client.rejections(limit=limit, cursor=cursor)
    else:
        found = await context.client.decisions(limit=limit, cursor=cursor)
    table = requests.requests(found.items[::-1], now=context.now, tz=viewer.tz)
    empty = "No request was rejected." if rejected_only else table.empty
    shown = filtered(newest_first(table, empty), viewer, requests.FIELDS, MAX_ROWS)
    data = {
        "rows": shown.table,
        "count": shown.count,
        "filter_error": shown.error,
        "older": viewer.href(cursor=found.next_cursor) if found.next_cursor else "",
        "views": VIEWS,
        "curl": "" if found.items or rejected_only else await curl_of(context),
    }
    crumbs = [("Requests", "/requests"), (title, "")] if rejected_only else [(title, "")]
    return Page(
        "requests.html",
        title,
        "requests",
        crumbs,
        data,
    )


async def request_page(context: Context, request_id: str) -> Page:
    """Waterfall, candidates, legs, outcome."""
    decision = await context.client.decision(request_id)
    view = requests.request(decision, now=context.now, tz=context.viewer.tz)
    short = numbers.short_id(request_id)
    crumbs = [("Requests", "/requests"), (short, "")]
    return Page("request.html", f"Request {short}", "requests", crumbs, {"view": view})
