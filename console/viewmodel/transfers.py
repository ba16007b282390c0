"""The transfer matrices: source x destination, of nodes and of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
from controlplane.nodes.schemas import Node
from controlplane.stats.schemas import Matrix, Pair

View = Literal["nodes", "workers"]
VIEWS: tuple[View, ...] = ("nodes", "workers")
TransferValue = Literal["p99", "p95", "bytes", "failures"]
VALUES_OF: dict[View, tuple[TransferValue, ...]] = {
    "nodes": ("p99", "bytes", "failures"),
    "workers": ("p95", "bytes", "failures"),
}
MAX_GRID = 64
"""Rows and columns of a matrix; of more those that moved most are shown."""
IN_PLACE = "its own blocks are read in place: nothing travels"
_BREACHING_SHARE = 0.75


class _Kind(NamedTuple):
    label: str
    scale: Scale
    read: Callable[[Pair, float], float | None]
    text: Callable[[float | None], str]
    bad: str
    adds_up: bool = False


_KINDS: dict[TransferValue, _Kind] = {
    "p99": _Kind("transfer P99", LATENCY, lambda pair, _: pair.p99_seconds, numbers.duration, "slow"),
    "p95": _Kind("transfer P95", LATENCY, lambda pair, _: pair.p95_seconds, numbers.duration, "slow"),
    "bytes": _Kind(
        "bytes moved per second",
        SHM_BYTES,
        lambda pair, w: pair.bytes / w,
        numbers.moved_rate,
        "busy",
        adds_up=True,
    ),
    "failures": _Kind(
        "failures a minute",
        FAILURES,
        lambda pair, w: pair.failures * 60 / w,
        numbers.per_minute,
        "failing",
        adds_up=True,
    ),
}  # fmt: skip
_EMPTY: dict[View, str] = {
    "nodes": "No KV has travelled between nodes in this window.",
    "workers": "No KV has travelled in this window.",
}
_ONE_NODE = "One node has joined: nothing can travel between nodes."


def first_view(nodes: Sequence[Node]) -> View:
    """What Transfers begins with: nodes where there are several."""
    return "nodes" if len(nodes) > 1 else "workers"


def is_node_pair(source: str, target: str, matrix: Matrix | None, nodes: Sequence[Node]) -> bool:
    """Does `source -> target` name two nodes? A pair that moved something decides, then the names."""
    for pair in matrix.pairs if matrix else ():
        if (pair.source, pair.destination) == (source, target):
            return pair.kind == "node"
    return {source, target} <= {node.id for node in nodes}


@dataclass(frozen=True, slots=True)
class _Grid:
    """What every cell of one matrix is made from."""

    view: View
    kind: _Kind
    pairs: Mapping[tuple[str, str], Pair]
    window: float
    levels: Mapping[tuple[str, str], int]


def transfers(
    matrix: Matrix | None,
    *,
    view: View = "workers",
    workers: Sequence[Worker] = (),
    nodes: Sequence[Node] = (),
    value: TransferValue | None = None,
    previous: Heatmap | None = None,
) -> Heatmap:
    """Every known source and destination has its row and column, with or without traffic."""
    value = value if value in VALUES_OF[view] else VALUES_OF[view][0]
    kind = _KINDS[value]
    pairs = _pairs(matrix, view)
    sources, targets, left_out = _ends(view, pairs, workers, nodes)
    window = max(1.0, matrix.window_seconds if matrix else 300.0)
    grid = _Grid(view, kind, pairs, window, previous_levels(previous, targets))
    labels = _labels(view, nodes, workers)
    columns = tuple(HeatColumn(target, labels.get(target, clean(target))) for target in targets)
    rows = tuple(
        _row(source, labels.get(source, clean(source)), targets, grid) for source in sources
    )
    more = (
        f"; {MAX_GRID} of {MAX_GRID + left_out} {view}, those that moved most" if left_out else ""
    )
    return Heatmap(
        name=f"{'node_' if view == 'nodes' else ''}transfers_{value}",
        title=f"{kind.label}, {numbers.window(window)}{_path(list(pairs.values()))}{more}",
        axis="matrix",
        rows=rows,
        columns=columns,
        scale=kind.scale,
        verdict=_verdict(rows, columns, kind.bad),
        empty=_empty(view, pairs, nodes),
        totals=tuple(_total(kind, [r.cells[i] for r in rows]) for i in range(len(columns))),
    )  # fmt: skip


def _pairs(matrix: Matrix | None, view: View) -> dict[tuple[str, str], Pair]:
    wanted = "node" if view == "nodes" else "worker"
    found = matrix.pairs if matrix else ()
    return {(p.source, p.destination): p for p in found if p.kind == wanted}


def _ends(
    view: View,
    pairs: Mapping[tuple[str, str], Pair],
    workers: Sequence[Worker],
    nodes: Sequence[Node],
) -> tuple[list[str], list[str], int]:
    """Sources, destinations, and how many of the longer list were left out."""
    sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
    if view == "workers":
        sources |= {w.id for w in workers if w.role != "decode"}
        targets |= {w.id for w in workers if w.role != "prefill"}
    else:
        sources = targets = sources | targets | {node.id for node in nodes}
    moved: Counter[str] = Counter()
    for (source, target), pair in pairs.items():
        moved[source] += pair.bytes
        moved[target] += pair.bytes
    left_out = max(len(sources), len(targets)) - MAX_GRID
    return _busiest(sources, moved), _busiest(targets, moved), max(0, left_out)


def _busiest(names: Collection[str], moved: Mapping[str, int]) -> list[str]:
    """By name; where there are too many, those that moved most."""
    return sorted(sorted(names, key=lambda name: (-moved.get(name, 0), name))[:MAX_GRID])


def _labels(view: View, nodes: Sequence[Node], workers: Sequence[Worker]) -> dict[str, str]:
    """A node that is not there says so; among workers a node stands for what came from it."""
    if view == "nodes":
        states = {node.id: "" if node.state == "ready" else f" {node.state}" for node in nodes}
        return {name: f"{clean(name)}{state}" for name, state in states.items()}
    own = {worker.id for worker in workers}
    return {node.id: f"node {clean(node.id)}" for node in nodes if node.id not in own}


def _empty(view: View, pairs: Mapping[tuple[str, str], Pair], nodes: Sequence[Node]) -> str:
    if any(pair.transfers or pair.bytes or pair.failures for pair in pairs.values()):
        return ""
    return _ONE_NODE if view == "nodes" and len(nodes) == 1 else _EMPTY[view]


def _row(source: str, label: str, targets: Sequence[str], grid: _Grid) -> HeatRow:
    cells = tuple(_cell(source, target, grid) for target in targets)
    total = _total(grid.kind, cells)
    breach = any(c.breach for c in cells)
    return HeatRow(source, label, cells, total, breach, opens=f"transfers/{source}")


def _cell(source: str, target: str, grid: _Grid) -> Cell:
    where = clean(f"{source} -> {target}")
    pair, kind = grid.pairs.get((source, target)), grid.kind
    if grid.view == "nodes" and source == target:
        return Cell(None, "absent", None, " ", f"{clean(source)}  {IN_PLACE}")
    if pair is None or not (pair.transfers or pair.failures or pair.bytes):
        return without_value("no_traffic", where)
    number = kind.read(pair, grid.window)
    if number is None:
        why = "" if pair.transfers else "  loaded again later, no handover timed"
        return without_value("no_data", f"{where}  {_facts(pair)}{why}")
    return valued(
        kind.scale,
        number,
        kind.text(number),
        f"{where}  {_facts(pair)}",
        previous=grid.levels.get((source, target)),
        numerator=float(pair.bytes),
        denominator=float(pair.transfers),
    )


def _facts(pair: Pair) -> str:
    rate = pair.bytes / pair.seconds if pair.seconds > 0 else None
    is_node = pair.kind == "node"
    tail, seconds = ("P99", pair.p99_seconds) if is_node else ("P95", pair.p95_seconds)
    lost = "missing" if is_node else "failed"
    return (
        f"P50 {numbers.duration(pair.p50_seconds)}  {tail} {numbers.duration(seconds)}"
        f"  {numbers.count(pair.transfers)} transfers, {numbers.count(pair.failures)} {lost}"
        f"  {numbers.moved_bytes(pair.bytes)}  {numbers.moved_rate(rate)} each  path {pair.path}"
    )


def _total(kind: _Kind, cells: Sequence[Cell]) -> str:
    """Counters add up; of latencies the worst."""
    seen = [c.value for c in cells if c.value is not None]
    if seen:
        return kind.text(sum(seen) if kind.adds_up else max(seen))
    unknown = any(c.state not in ("no_traffic", "absent") for c in cells)
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


def _pair_columns(view: View) -> tuple[Column, ...]:
    tail, lost = ("P99", "MISSING") if view == "nodes" else ("P95", "FAILED")
    return (
        Column("pair", "PAIR", 16, grow=True),
        Column("path", "PATH", 5, drop=3),
        Column("transfers", "TRANSFERS", 9, "right"),
        Column("bytes", "BYTES", 9, "right"),
        Column("p50", "P50", 9, "right", drop=2),
        Column(tail.lower(), tail, 9, "right"),
        Column("each", "EACH", 10, "right", drop=1),
        Column("failed", lost, 7, "right"),
    )


def pair_table(matrix: Matrix | None, view: View = "workers") -> Table:
    """The matrix as rows, slowest first. Each opens its pair."""
    pairs = sorted(
        _pairs(matrix, view).values(),
        key=lambda p: (-(_tail(p) or 0), p.source, p.destination),
    )
    return Table(_pair_columns(view), tuple(map(_pair_row, pairs)), _EMPTY[view])


def _tail(pair: Pair) -> float | None:
    return pair.p99_seconds if pair.kind == "node" else pair.p95_seconds


def _pair_row(pair: Pair) -> Row:
    rate = pair.bytes / pair.seconds if pair.seconds > 0 else None
    tail = _tail(pair)
    slow = LATENCY.breaches(tail)
    cells = (
        cell(f"{pair.source} -> {pair.destination}"),
        Text(pair.path),
        Text(numbers.count(pair.transfers)),
        Text(numbers.moved_bytes(pair.bytes)),
        Text(numbers.duration(pair.p50_seconds)),
        Text(numbers.duration(tail) + ("!" if slow else ""), "warn" if slow else "plain"),
        Text(numbers.moved_rate(rate)),
        Text(numbers.count(pair.failures), "critical" if pair.failures else "plain"),
    )
    facts: dict[str, Fact] = {
        "from": pair.source,
        "to": pair.destination,
        "path": pair.path,
        "bytes": pair.bytes,
        "p95": pair.p95_seconds,
        "p99": pair.p99_seconds,
        "failed": pair.failures,
    }
    name = f"{pair.source}>{pair.destination}"
    return Row(name, cells, facts, f"transfers/{pair.source}/{pair.destination}")


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
