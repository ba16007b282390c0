"""What the next report would tell."""

from __future__ import annotations

from controlplane.gateway.records import Records
from controlplane.gateway.wire import Decision


def reported(records: Records) -> list[Decision]:
    """All of it; then it has been told."""
    records.announce()
    return records.take()
