"""Audit: one row for every write."""

from datetime import datetime

from controlplane.schema_base import Page, Schema


class AuditRow(Schema):
    """Append-only. `before` and `after` are short JSON texts."""

    id: int
    at: datetime
    actor: str
    verb: str  # policy.put, worker.restart, node.remove, key.create, ...
    target: str
    before: str = ""
    after: str = ""
    reason: str = ""
    result: str = "ok"
    request_id: str = ""


class AuditList(Page):
    """GET /api/v1/audit, newest first."""

    items: list[AuditRow]
