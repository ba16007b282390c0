"""Transfers between nodes for a terminal or a pipe. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.cli_text import table
from controlplane.transfers.schemas import NodeTransferList, NodeTransfers
from workers.core import numbers

HEAD = (
    "FROM", "TO", "PATH", "MODE", "CLASS", "TRANSFERS", "BYTES", "RETRIES", "MISSING", "IN FLIGHT",
    "QUEUE P99", "WIRE P50", "WIRE P99", "SUM P99",
)  # fmt: skip


def node_transfers(found: NodeTransferList) -> str:
    """A row a pair, transport and class; alarms under it."""
    lines = [
        table(HEAD, map(_row, found.rows), "No transfer between nodes since the agents started.")
    ]
    if found.total > len(found.rows):
        lines.append(f"{found.total - len(found.rows)} more")
    return "\n".join([*lines, *_modes(found), *_alarms(found)])


def _row(row: NodeTransfers) -> tuple[str, ...]:
    stages = {stage.stage: stage for stage in row.stages}
    queue, wire, total = (stages.get(name) for name in ("queue_wait", "wire", "total"))
    return (
        row.source,
        row.destination,
        row.transport,
        row.mode,
        row.priority,
        numbers.count(row.transfers),
        numbers.moved_bytes(row.bytes),
        numbers.count(row.retries),
        _missing(row.missing),
        numbers.count(row.in_flight),
        numbers.duration(queue.p99_seconds if queue else None),
        numbers.duration(wire.p50_seconds if wire else None),
        numbers.duration(wire.p99_seconds if wire else None),
        numbers.duration(total.p99_seconds if total else None),
    )


def _missing(causes: dict[str, int]) -> str:
    return ", ".join(f"{numbers.count(n)} {cause}" for cause, n in sorted(causes.items())) or "0"


def _modes(found: NodeTransferList) -> Iterator[str]:
    for mode in found.modes:
        yield f"{mode.source} to {mode.destination}: {mode.mode}, {mode.why}"


def _alarms(found: NodeTransferList) -> Iterator[str]:
    for alarm in found.alarms:
        yield f"ALARM  {alarm.node}: {alarm.text}"
