"""What changed lately, in one line each. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable

from controlplane.audit.schemas import AuditRow
from controlplane.nodes.schemas import Node
from controlplane.stats.schemas import Change

HOUR_SECONDS = 3600.0
MAX_CHANGES = 20


def changes(rows: Iterable[AuditRow], nodes: Iterable[Node], now: float) -> list[Change]:
    """Operators' acts and nodes that joined within the hour, newest first."""
    found = [
        Change(at=row.at.timestamp(), text=_words(row), actor=row.actor, reason=row.reason)
        for row in rows
    ]
    found += [
        Change(
            at=node.joined_at.timestamp(),
            text=f"{node.id} joined" + (f", restart {node.restarts}" if node.restarts else ""),
            actor="agent",
        )
        for node in nodes
    ]
    recent = [change for change in found if now - change.at <= HOUR_SECONDS]
    return sorted(recent, key=lambda change: -change.at)[:MAX_CHANGES]


def _words(row: AuditRow) -> str:
    if row.verb.startswith("policy."):
        before, after = _revision(row.before), _revision(row.after)
        step = f"r{before} -> r{after}" if before else f"r{after}"
        return f"policy {row.target} {step}"
    noun, _, verb = row.verb.partition(".")
    return f"{noun} {row.target} {verb}"


def _revision(text: str) -> int | None:
    try:
        value = json.loads(text or "{}").get("revision")
    except (ValueError, AttributeError):
        return None
    return value if isinstance(value, int) else None
