"""The transfer matrix: source x destination."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import tzinfo
from typing import Literal, NamedTuple

from console.viewmodel import numbers
from console.viewmodel.heatmap import (
    Cell,
    HeatColumn,
    Heatmap,
    HeatRow,
    previous_levels,
    valued,
    without_value,
)
from console.viewmodel.levels import FAILURES, LATENCY, SHM_BYTES, Scale
from console.viewmodel.requests import latency
from console.viewmodel.table import Column, Fact, Row, Table, Text, cell, clean
from controlplane.decisions.schemas import Decision
from controlplane.fleet.schemas import Worker
from controlplane.stats.schemas import Matrix, Pair

TransferValue = Literal["p95", "bytes", "failures"]
VALUES: tuple[TransferValue, ...] = ("p95", "bytes", "failures")
_BREACHING_SHARE = 0.75


class _Kind(NamedTuple):
    label: str
    scale: Scale
    read: Callable[[Pair, float], float | None]
    text: Callable[[float | None], str]
    bad: str


_KINDS: dict[TransferValue, _Kind] = {
    "p95": _Kind("transfer P95", LATENCY, lambda pair, _: pair.p95_seconds, numbers.duration, "slow"),
    "bytes": _Kind(
        "bytes moved per second", SHM_BYTES, lambda pair, w: pair.bytes / w, numbers.moved_rate, "busy"
    ),
    "failures": _Kind(
        "failures a minute",
        FAILURES,
        lambda pair, w: pair.failures * 60 / w,
        numbers.per_minute,
        "failing",
    ),
}  # fmt: skip


def transfers(
    matrix: Matrix | None,
    *,
    workers: Sequence[Worker] = (),
    value: TransferValue = "p95",
    previous: Heatmap | None = None,
) -> Heatmap:
    """Every known source and destination has its row and column, with or without traffic."""
    kind = _KINDS[value]
    pairs = {(p.source, p.destination): p for p in matrix.pairs} if matrix else {}
    sources = sorted({p[0] for p in pairs} | {w.id for w in workers if w.role != "decode"})
    targets = sorted({p[1] for p in pairs} | {w.id for w in workers if w.role != "prefill"})
    window = max(1.0, matrix.window_seconds if matrix else 300.0)
    levels = previous_levels(previous, targets)
    columns = tuple(HeatColumn(target, clean(target)) for target in targets)
    rows = tuple(_row(s, targets, pairs, window, kind, levels) for s in sources)
    moved = any(pair.transfers or pair.bytes for pair in pairs.values())
    return Heatmap(
        name=f"transfers_{value}",
        title=f"{kind.label}, {numbers.window(window)}{_path(list(pairs.values()))}",
        axis="matrix",
        rows=rows,
        columns=columns,
        scale=kind.scale,
        verdict=_verdict(rows, columns, kind.bad),
        empty="" if moved else "No KV has travelled in this window.",
        totals=tuple(_worst_text(kind, [r.cells[i] for r in rows]) for i in range(len(columns))),
    )


def _row(
    source: str,
    targets: Sequence[str],
    pairs: Mapping[tuple[str, str], Pair],
    window: float,
    kind: _Kind,
    levels: Mapping[tuple[str, str], int],
) -> HeatRow:
    cells = tuple(
        _cell(source, target, pairs.get((source, target)), window, kind, levels)
        for target in targets
    )
    return HeatRow(
        source,
        clean(source),
        cells,
        _worst_text(kind, cells),
        any(c.breach for c in cells),
        opens=f"transfers/{source}",
    )


def _cell(
    source: str,
    target: str,
    pair: Pair | None,
    window: float,
    kind: _Kind,
    levels: Mapping[tuple[str, str], int],
) -> Cell:
    where = clean(f"{source} -> {target}")
    if pair is None or not (pair.transfers or pair.failures or pair.bytes):
        return without_value("no_traffic", where)
    number = kind.read(pair, window)
    if number is None:
        why = "" if pair.transfers else "  loaded again later, no handover timed"
        return without_value("no_data", f"{where}  {_facts(pair)}{why}")
    return valued(
        kind.scale,
        number,
        kind.text(number),
        f"{where}  {_facts(pair)}",
        previous=levels.get((source, target)),
        numerator=float(pair.bytes),
        denominator=float(pair.transfers),
    )


def _facts(pair: Pair) -> str:
    rate = pair.bytes / pair.seconds if pair.seconds > 0 else None
    return (
        f"P50 {numbers.duration(pair.p50_seconds)}  P95 {numbers.duration(pair.p95_seconds)}"
        f"  {numbers.count(pair.transfers)} transfers, {numbers.count(pair.failures)} failed"
        f"  {numbers.moved_bytes(pair.bytes)}  {numbers.moved_rate(rate)} each  path {pair.path}"
    )


def _worst_text(kind: _Kind, cells: Sequence[Cell]) -> str:
    seen = [c.value for c in cells if c.value is not None]
    if seen:
        return kind.text(max(seen))
    unknown = any(c.state != "no_traffic" for c in cells)
    return numbers.UNKNOWN if unknown else numbers.NO_TRAFFIC


def _path(pairs: Sequence[Pair]) -> str:
    paths = sorted({pair.path for pair in pairs})
    return f"; path {', '.join(paths)}" if paths else ""


def _verdict(rows: Sequence[HeatRow], columns: Sequence[HeatColumn], bad: str) -> str:
    """Names a row or column only when at least 3 of 4 of its cells with traffic breach."""
    breaching = [(r, c) for r in rows for c, x in zip(columns, r.cells, strict=True) if x.breach]
    if not breaching:
        return ""
    for place, column in enumerate(columns):
        busy = [row.cells[place] for row in rows if row.cells[place].state == "ok"]
        if _most(busy):
            num = sum(c.breach for c in busy)
            return f"column {column.label}: {num} of {len(busy)} sources {bad} -> look at the destination"
    for row in rows:
        busy = [c for c in row.cells if c.state == "ok"]
        if _most(busy):
            num = sum(c.breach for c in busy)
            return f"row {row.label}: {num} of {len(busy)} destinations {bad} -> look at the source"
    row, column = breaching[0]
    more = f" and {len(breaching) - 1} more" if len(breaching) > 1 else ""
    return f"single pair {row.label} -> {column.label}{more} {bad}"


def _most(cells: Sequence[Cell]) -> bool:
    return len(cells) > 1 and sum(c.breach for c in cells) >= _BREACHING_SHARE * len(cells)


PAIR_COLUMNS = (
    Column("pair", "PAIR", 16, grow=True),
    Column("path", "PATH", 5, drop=3),
    Column("transfers", "TRANSFERS", 9, "right"),
    Column("bytes", "BYTES", 9, "right"),
    Column("p50", "P50", 9, "right", drop=2),
    Column("p95", "P95", 9, "right"),
    Column("each", "EACH", 10, "right", drop=1),
    Column("failed", "FAILED", 6, "right"),
)


def pair_table(matrix: Matrix | None) -> Table:
    """The matrix as rows, slowest first."""
    pairs = sorted(
        matrix.pairs if matrix else (),
        key=lambda p: (-(p.p95_seconds or 0), p.source, p.destination),
    )
    return Table(PAIR_COLUMNS, tuple(map(_pair_row, pairs)), "No KV has travelled in this window.")


def _pair_row(pair: Pair) -> Row:
    rate = pair.bytes / pair.seconds if pair.seconds > 0 else None
    name = f"{pair.source} -> {pair.destination}"
    slow = LATENCY.breaches(pair.p95_seconds)
    cells = (
        cell(name),
        Text(pair.path),
        Text(numbers.count(pair.transfers)),
        Text(numbers.moved_bytes(pair.bytes)),
        Text(numbers.duration(pair.p50_seconds)),
        Text(
            numbers.duration(pair.p95_seconds) + ("!" if slow else ""), "warn" if slow else "plain"
        ),
        Text(numbers.moved_rate(rate)),
        Text(numbers.count(pair.failures), "critical" if pair.failures else "plain"),
    )
    facts: dict[str, Fact] = {
        "from": pair.source,
        "to": pair.destination,
        "path": pair.path,
        "bytes": pair.bytes,
        "p95": pair.p95_seconds,
        "failed": pair.failures,
    }
    return Row(f"{pair.source}>{pair.destination}", cells, facts)


HANDOVER_COLUMNS = (
    Column("at", "TIME", 8),
    Column("request", "REQUEST", 8),
    Column("status", "STATUS", 15),
    Column("blocks", "BLOCKS", 6, "right"),
    Column("bytes", "BYTES", 9, "right"),
    Column("failed", "FAILED", 6, "right"),
    Column("predicted", "PREDICTED", 9, "right", drop=1),
    Column("handover", "HANDOVER", 9, "right"),
    Column("wait", "KV WAIT", 9, "right"),
)


def handovers(decisions: Sequence[Decision], source: str, target: str, *, tz: tzinfo) -> Table:
    """The last requests that this pair served, newest first: what decode loaded, and how long."""
    rows = tuple(
        _handover_row(decision, tz)
        for decision in reversed(decisions)
        if (decision.prefill_worker, decision.decode_worker) == (source, target)
    )
    return Table(HANDOVER_COLUMNS, rows, "No request among the last ones went this way.")


def _handover_row(decision: Decision, tz: tzinfo) -> Row:
    leg = decision.decode_leg
    phase = next((p for p in decision.phases if p.name == "handover"), None)
    predicted = phase.predicted_seconds if phase else None
    measured = phase.measured_seconds if phase else None
    failed = leg.failed_blocks if leg else None
    cells = (
        Text(numbers.clock(decision.at, tz)),
        cell(numbers.short_id(decision.request_id)),
        Text(decision.status),
        Text(numbers.count(leg.loaded_blocks if leg else None)),
        Text(numbers.moved_bytes(leg.loaded_bytes if leg else None)),
        Text(numbers.count(failed), "critical" if failed else "plain"),
        Text(latency(decision, predicted)),
        Text(latency(decision, measured)),
        Text(numbers.duration(leg.kv_wait_seconds if leg else None)),
    )
    facts: dict[str, Fact] = {"id": decision.request_id, "handover": measured}
    return Row(decision.request_id, cells, facts, f"request/{decision.request_id}")
