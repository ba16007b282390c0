"""The audit trail."""

from __future__ import annotations

from dataclasses import replace

from console.viewmodel import audit

from .base import MAX_ROWS, MAX_ROWS_FILTERED, Context, Page, filtered


async def audit_page(context: Context) -> Page:
    """Every write, newest first."""
    viewer = context.viewer
    limit = MAX_ROWS_FILTERED if viewer.filter else MAX_ROWS
    found = await context.client.audit(limit=limit, cursor=viewer.cursor or None)
    table = audit.audit(found.items, now=context.now, tz=viewer.tz)
    plain = replace(table, rows=tuple(replace(row, opens="") for row in table.rows))
    shown = filtered(plain, viewer, audit.FIELDS, MAX_ROWS)
    data = {
        "rows": shown.table,
        "count": shown.count,
        "filter_error": shown.error,
        "older": viewer.href(cursor=found.next_cursor) if found.next_cursor else "",
    }
    return Page("audit.html", "Audit", "audit", [("Audit", "")], data)
