"""A policy's revisions: each with what it changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo

from console.viewmodel import numbers
from console.viewmodel.spec_text import show
from console.viewmodel.table import Column, Row, Table, Text, cell
from controlplane.policies.schemas import PolicyRevision

COLUMNS = (
    Column("revision", "REVISION", 8, "right"),
    Column("state", "", 7),
    Column("at", "WRITTEN", 11),
    Column("by", "BY", 12),
    Column("change", "CHANGED", 30, grow=True),
    Column("reason", "REASON", 20, grow=True, drop=1),
)


def history(revisions: Sequence[PolicyRevision], *, now: float, tz: tzinfo) -> Table:
    """Newest first. `now` in seconds since the epoch."""
    ordered = sorted(revisions, key=lambda r: -r.revision)
    older = [*ordered[1:], None][: len(ordered)]
    rows = tuple(
        _row(revision, before, now, tz) for revision, before in zip(ordered, older, strict=True)
    )
    return Table(COLUMNS, rows, "Reading the revisions.")


def _row(revision: PolicyRevision, before: PolicyRevision | None, now: float, tz: tzinfo) -> Row:
    cells = (
        Text(f"r{revision.revision}", "strong" if revision.active else "plain"),
        Text("active" if revision.active else "", "well"),
        Text(numbers.stamp(revision.created_at, now, tz)),
        cell(revision.author),
        cell(_changed(revision, before)),
        cell(revision.reason or numbers.NO_TRAFFIC, "muted"),
    )
    return Row(str(revision.revision), cells)


def _changed(revision: PolicyRevision, before: PolicyRevision | None) -> str:
    """`max_ttft_ms 10000 -> 300`; `--` where the one before was not read."""
    if before is None:
        return "first" if revision.revision == 1 else numbers.UNKNOWN
    changes = (
        f"{name} {show(before.spec.get(name))} -> {show(value)}"
        for name, value in revision.spec.items()
        if before.spec.get(name) != value
    )
    return ", ".join(changes) or "no change"


def in_full(row: Row) -> tuple[Text, ...]:
    """What the row's columns may cut off: all that changed, and why."""
    revision, change, reason = row.cells[0].text, row.cells[4].text, row.cells[5].text
    why = "no reason given" if reason == numbers.NO_TRAFFIC else reason
    return (Text(f"{revision}  {change}"), Text(why, "muted"))
