"""What the next report would tell."""

from __future__ import annotations

from controlplane.gateway.records import MAX_PER_REPORT, Records
from controlplane.gateway.wire import Decision


def reported(records: Records) -> list[Decision]:
    """All of it; then it has been told."""
    records.announce()
    taken = (records.take() for _ in range(MAX_PER_REPORT))
    return [one for one in taken if one is not None]
