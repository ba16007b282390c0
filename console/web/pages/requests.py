"""The live list, what is in flight, who was turned away, one request opened."""

from __future__ import annotations

from console.viewmodel import ledger, numbers, requests, running
from controlplane.gateways import calls as running_calls
from controlplane.gateways.running_schemas import RunningList
from controlplane.ledger import calls as ledger_calls
from controlplane.ledger.schemas import LedgerList, LedgerSummary

from .base import MAX_ROWS, MAX_ROWS_FILTERED, Context, Page, curl_of, filtered
from .cluster import newest_first

VIEWS = (("/requests", "Live"), ("/in-flight", "In flight"), ("/rejections", "Rejections"))
MAX_RUNNING = 1000
CANCEL = (("cancel_request", "Cancel"),)


async def requests_page(context: Context) -> Page:
    """Newest first, a page of rows at a time."""
    viewer = context.viewer
    limit = MAX_ROWS_FILTERED if viewer.filter else MAX_ROWS
    found = await context.client.decisions(limit=limit, cursor=viewer.cursor or None)
    table = requests.requests(found.items[::-1], now=context.now, tz=viewer.tz)
    shown = filtered(newest_first(table), viewer, requests.FIELDS, MAX_ROWS)
    data = {
        "rows": shown.table,
        "count": shown.count,
        "filter_error": shown.error,
        "older": viewer.href(cursor=found.next_cursor) if found.next_cursor else "",
        "views": VIEWS,
        "curl": "" if found.items else await curl_of(context),
    }
    return Page("requests.html", "Requests", "requests", [("Requests", "")], data)


async def in_flight_page(context: Context) -> Page:
    """What each request waits for, nearest to its bound first; each can be cancelled."""
    viewer = context.viewer
    limit = MAX_ROWS_FILTERED if viewer.filter else MAX_ROWS
    found: RunningList = await context.client.send(running_calls.running(limit))
    shown = filtered(running.running(found), viewer, running.FIELDS)
    data = {
        "head": running.head(found, now=context.now, tz=viewer.tz),
        "rows": shown.table,
        "count": shown.count,
        "filter_error": shown.error,
        "views": VIEWS,
        "acts": {
            row.key: CANCEL
            for row in shown.table.rows
            if row.facts["gateway"] not in running.silent(found)
        },
    }
    crumbs = [("Requests", "/requests"), ("In flight", "")]
    return Page("in_flight.html", "In flight", "requests", crumbs, data, has_acts=True)


async def rejections_page(context: Context) -> Page:
    """The ledger: what the last hour comes to, then its entries, a page of rows at a time."""
    viewer = context.viewer
    limit = MAX_ROWS_FILTERED if viewer.filter else MAX_ROWS
    call = ledger_calls.ledger(limit=limit, cursor=viewer.cursor or None)
    found: LedgerList = await context.client.send(call)
    summary: LedgerSummary = await context.client.send(ledger_calls.summary(ledger.WINDOW_SECONDS))
    active = await context.client.policies()
    table = ledger.ledger(found.items, now=context.now, tz=viewer.tz)
    shown = filtered(table, viewer, ledger.FIELDS, MAX_ROWS)
    data = {
        "head": ledger.head(summary, active, now=context.now, tz=viewer.tz),
        "rows": shown.table,
        "count": shown.count,
        "filter_error": shown.error,
        "older": viewer.href(cursor=found.next_cursor) if found.next_cursor else "",
        "views": VIEWS,
    }
    crumbs = [("Requests", "/requests"), ("Rejections", "")]
    return Page("rejections.html", "Rejections", "requests", crumbs, data)


async def request_page(context: Context, request_id: str) -> Page:
    """Waterfall, candidates, legs, outcome."""
    decision = await context.client.decision(request_id)
    view = requests.request(decision, now=context.now, tz=context.viewer.tz)
    short = numbers.short_id(request_id)
    crumbs = [("Requests", "/requests"), (short, "")]
    runs = decision.status == "running"
    data = {
        "view": view,
        "buttons": CANCEL if runs else (),
        "target": f"{decision.gateway_id}/{request_id}",
    }
    title = f"Request {short}"
    return Page("request.html", title, "requests", crumbs, data, has_acts=runs)
