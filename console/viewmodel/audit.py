"""The audit trail: one row for every write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import tzinfo

from console.viewmodel import numbers
from console.viewmodel.filters import FieldKind
from console.viewmodel.table import Column, Fact, Row, Table, Text, cell
from controlplane.audit.schemas import AuditRow

COLUMNS = (
    Column("at", "TIME", 11),
    Column("actor", "ACTOR", 12),
    Column("verb", "VERB", 14),
    Column("target", "TARGET", 16),
    Column("change", "BEFORE -> AFTER", 24, grow=True, drop=2),
    Column("reason", "REASON", 18, grow=True, drop=1),
    Column("result", "RESULT", 8),
    Column("request", "REQUEST-ID", 10, drop=3),
)
FIELDS: dict[str, FieldKind] = {
    "actor": "text",
    "verb": "text",
    "target": "text",
    "result": "text",
    "reason": "text",
}


def audit(rows: Sequence[AuditRow], *, now: float, tz: tzinfo) -> Table:
    """Newest first. `now` in seconds since the epoch."""
    ordered = sorted(rows, key=lambda row: -row.id)
    return Table(
        COLUMNS,
        tuple(_row(row, now, tz) for row in ordered),
        "Nothing has been written yet: policies, keys and workers are as they started.",
    )


def _row(row: AuditRow, now: float, tz: tzinfo) -> Row:
    cells = (
        Text(numbers.stamp(row.at, now, tz)),
        cell(row.actor),
        cell(row.verb),
        cell(row.target),
        cell(change(row.before, row.after)),
        cell(row.reason or numbers.NO_TRAFFIC),
        cell(row.result, "plain" if row.result == "ok" else "warn"),
        cell(numbers.short_id(row.request_id) if row.request_id else numbers.NO_TRAFFIC, "muted"),
    )
    facts: dict[str, Fact] = {
        "actor": row.actor,
        "verb": row.verb,
        "target": row.target,
        "result": row.result,
        "reason": row.reason,
    }
    return Row(str(row.id), cells, facts, f"audit/{row.id}")


def change(before: str, after: str) -> str:
    """`max_ttft_ms 2000 -> 1` where both are JSON objects, else both texts."""
    old, new = _object(before), _object(after)
    if old is None or new is None:
        return f"{before or numbers.NO_TRAFFIC} -> {after or numbers.NO_TRAFFIC}"
    names = sorted(set(old) | set(new))
    parts = [
        f"{name} {_value(old.get(name))} -> {_value(new.get(name))}"
        for name in names
        if old.get(name) != new.get(name)
    ]
    return ", ".join(parts) or "no change"


def _object(text: str) -> dict[str, object] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    spec = value.get("spec")
    return spec if isinstance(spec, dict) else value


def _value(value: object) -> str:
    if value is None:
        return numbers.NO_TRAFFIC
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
