"""Operators' pins, as the nodes told them a moment ago."""

from __future__ import annotations

from datetime import tzinfo

from console.viewmodel import numbers
from console.viewmodel.table import Column, Row, Table, Text, cell
from controlplane.cache.schemas import CachePinList, CachePinned

COLUMNS = (
    Column("name", "PIN", 16, grow=True),
    Column("node", "NODE", 10),
    Column("blocks", "BLOCKS", 9, "right"),
    Column("bytes", "BYTES", 10, "right"),
    Column("share", "% OF POOL", 9, "right", drop=1),
    Column("chains", "CHAINS", 7, "right", drop=2),
    Column("until", "UNTIL", 11),
)
NOT_YET = "Asking the nodes for their pins."
EMPTY = "No operator has pinned anything. A tenant or namespace is pinned in Cache, tenants."


def pins(found: CachePinList | None, *, now: float, tz: tzinfo) -> Table:
    """One row a pin and node; nodes that did not answer are named where nothing else stands."""
    if found is None:
        return Table(COLUMNS, (), NOT_YET)
    missing = ", ".join(f"{node}: {why}" for node, why in sorted(found.unreachable.items()))
    empty = f"No pin is known. No answer from {missing}." if missing else EMPTY
    return Table(COLUMNS, tuple(_row(pin, now, tz) for pin in found.items), cell(empty).text)


def _row(pin: CachePinned, now: float, tz: tzinfo) -> Row:
    until = "for good" if pin.expires_at is None else numbers.stamp(pin.expires_at, now, tz)
    cells = (
        cell(pin.name, "strong"),
        cell(pin.node),
        Text(numbers.count(pin.blocks)),
        Text(numbers.stored_bytes(pin.bytes)),
        Text(numbers.percent(pin.share, unit=False)),
        Text(numbers.count(pin.chains)),
        Text(until),
    )
    return Row(f"{pin.name}/{pin.node}", cells, {"name": pin.name, "node": pin.node})
