"""The cache's figures: local hit rate by node, evictions by reason, the pool's tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import TypeVar

from console.viewmodel import numbers
from console.viewmodel.freshness import is_old, marked
from console.viewmodel.heatmap import (
    Cell,
    CellState,
    HeatColumn,
    Heatmap,
    HeatRow,
    previous_levels,
    valued,
    without_value,
)
from console.viewmodel.history import bucket_for, rebucket
from console.viewmodel.levels import EVICTIONS, HIT_RATE
from console.viewmodel.table import Column, Row, Table, Text, Tone, cell
from controlplane.fleet.schemas import Worker
from controlplane.nodes.schemas import Node
from controlplane.stats.schemas import SeriesReply

_T = TypeVar("_T")
Values = Mapping[tuple[str, str], tuple[list[float | None], list[str]]]

EVICTION_REASONS = (
    ("evicted_capacity", "capacity"),
    ("evicted_quota", "quota"),
    ("evicted_ssd_capacity", "SSD capacity"),
    ("evicted_corrupt", "corrupt"),
    ("evicted_failed_write", "failed write"),
    ("evicted_tier_lost", "tier lost"),
)
"""Purges are an operator's: they are counted apart."""


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """How a figure over time is cut: `now` in seconds since the epoch, the viewer's zone."""

    now: float
    tz: tzinfo
    window_seconds: float = 900.0
    num_columns: int = 90


def hit_rate(
    series: SeriesReply,
    nodes: Sequence[Node],
    axis: TimeAxis,
    *,
    workers: Sequence[Worker] = (),
    previous: Heatmap | None = None,
) -> Heatmap:
    """Node x time of `prompt_tokens` and `hit_tokens` of the sources `node:*` (and `cluster`)."""
    columns, values = _cut(series, axis)
    levels = previous_levels(previous, _open_keys(columns))
    rows = [
        _hit_row(
            f"node:{node.id}",
            node,
            _node_label(node, workers),
            columns,
            values,
            levels,
            _closed(previous, node.id),
        )
        for node in sorted(nodes, key=lambda node: node.id)
    ]
    if len(nodes) > 1 and ("cluster", "prompt_tokens") in values:
        known = _closed(previous, "all")
        rows.append(_hit_row("cluster", None, "all", columns, values, levels, known))
    traffic = any(c.state == "ok" for row in rows for c in row.cells)
    return Heatmap(
        name="hit_rate",
        title=f"local hit rate, % of prompt tokens requested; {numbers.window(_step(series, axis))} columns,"
        f" {numbers.window(axis.window_seconds)} to {_end(columns, axis)}",
        axis="time",
        rows=tuple(rows),
        columns=columns,
        scale=HIT_RATE,
        empty=""
        if traffic
        else "No lookups in this window: hit rate has no value (not 0 %)."
        if nodes
        else "No nodes have joined, so nothing is cached.",
    )


def _hit_row(
    source: str,
    node: Node | None,
    label: str,
    columns: Sequence[HeatColumn],
    values: Values,
    levels: Mapping[tuple[str, str], int],
    known: Mapping[str, Cell],
) -> HeatRow:
    key = node.id if node else "all"
    nothing: list[float | None] = [None] * len(columns)
    asked, marks = values.get((source, "prompt_tokens"), (nothing, [""] * len(columns)))
    hits, _ = values.get((source, "hit_tokens"), (nothing, []))
    reported = next((i for i, value in enumerate(asked) if value is not None), len(columns))
    cells = tuple(
        _same(known.get(column.key), column, hits[i], asked[i], marks[i])
        or _hit_cell(
            key,
            column,
            hits[i],
            asked[i],
            _why_no_data(column, node, i > reported),
            levels,
            marks[i],
        )
        for i, column in enumerate(columns)
    )
    total = sum(value for value in asked if value)
    got = sum(c.numerator or 0.0 for c in cells)
    rate = got / total if total else None
    return HeatRow(
        key,
        label,
        cells,
        numbers.NO_TRAFFIC if rate is None else numbers.percent(rate, unit=False),
        HIT_RATE.breaches(rate),
        opens=f"node/{node.id}" if node else "",
    )


def _closed(previous: Heatmap | None, key: str) -> dict[str, Cell]:
    """Cells of a row's closed columns as drawn last: they hardly ever change."""
    row = next((r for r in previous.rows if r.key == key), None) if previous else None
    if previous is None or row is None:
        return {}
    pairs = zip(previous.columns, row.cells, strict=True)
    return {column.key: cell for column, cell in pairs if not column.is_open}


def _same(
    cell: Cell | None, column: HeatColumn, hit: float | None, asked: float | None, mark: str
) -> Cell | None:
    """The cell again, if nothing that it says has changed."""
    if cell is None or column.is_open or cell.state != "ok" or cell.mark != mark:
        return None
    same = (cell.numerator, cell.denominator) == (hit, asked)
    return cell if same and cell.readout.find(column.span) >= 0 else None


def _hit_cell(
    key: str,
    column: HeatColumn,
    hit: float | None,
    asked: float | None,
    gap: CellState,
    levels: Mapping[tuple[str, str], int],
    mark: str,
) -> Cell:
    where = f"{key}  {column.span}"
    if asked is None or (asked and hit is None):
        return without_value(gap, where, mark=mark)
    if not asked:
        return without_value("no_traffic", where, mark=mark)
    rate = (hit or 0.0) / asked
    text = numbers.percent(rate)
    tokens = f"{numbers.count(hit)} of {numbers.count(asked)} tokens"
    return valued(
        HIT_RATE,
        rate,
        text,
        f"{where}  {text}  {tokens}",
        previous=levels.get((key, column.key)),
        numerator=hit,
        denominator=asked,
        mark=mark,
    )


def evictions(
    series: SeriesReply,
    axis: TimeAxis,
    *,
    previous: Heatmap | None = None,
) -> Heatmap:
    """Reason x time in blocks a second, summed over the sources given."""
    columns, values = _cut(series, axis)
    levels = previous_levels(previous, _open_keys(columns))
    rows = tuple(
        _eviction_row(metric, label, columns, values, axis, levels)
        for metric, label in EVICTION_REASONS
    )
    known = any(c.state == "ok" for row in rows for c in row.cells)
    return Heatmap(
        name="evictions",
        title=f"evictions, blocks/s by reason; {numbers.window(axis.window_seconds)}"
        f" to {_end(columns, axis)}",
        axis="time",
        rows=rows,
        columns=columns,
        scale=EVICTIONS,
        empty="" if known else "No node has reported evictions in this window.",
    )


def _eviction_row(
    metric: str,
    label: str,
    columns: Sequence[HeatColumn],
    values: Values,
    axis: TimeAxis,
    levels: Mapping[tuple[str, str], int],
) -> HeatRow:
    sources = [pair for name, pair in values.items() if name[1] == metric]
    cells: list[Cell] = []
    for place, column in enumerate(columns):
        seen = [v[place] for v, _ in sources if v[place] is not None]
        mark = "R" if any(m[place] for _, m in sources) else ""
        blocks = sum(value for value in seen if value is not None) if seen else None
        cells.append(_eviction_cell(label, column, blocks, axis, levels, mark))
    total = sum(c.numerator or 0.0 for c in cells)
    known = any(c.state == "ok" for c in cells)
    return HeatRow(label, label, tuple(cells), numbers.count(total if known else None))


def _eviction_cell(
    label: str,
    column: HeatColumn,
    blocks: float | None,
    axis: TimeAxis,
    levels: Mapping[tuple[str, str], int],
    mark: str,
) -> Cell:
    where = f"{label}  {column.span}"
    if blocks is None:
        return without_value("no_data", where, mark=mark)
    seconds = _seconds(column, axis.now)
    rate = blocks / seconds
    text = numbers.per_second(rate)
    return valued(
        EVICTIONS,
        rate,
        text,
        f"{where}  {text}  {numbers.count(blocks)} blocks in {numbers.window(seconds)}",
        previous=levels.get((label, column.key)),
        numerator=blocks,
        denominator=seconds,
        mark=mark,
    )


TIER_COLUMNS = (
    Column("node", "NODE", 10, grow=True),
    Column("state", "STATE", 11),
    Column("used", "DRAM USED", 16, "right"),
    Column("percent", "USED %", 7, "right"),
    Column("blocks", "BLOCKS", 9, "right", drop=2),
    Column("pinned", "PINNED", 8, "right"),
    Column("queue", "WRITE QUEUE", 12, "right", drop=1),
    Column("size", "BLOCK", 9, "right", drop=3),
)


def tiers(nodes: Sequence[Node]) -> Table:
    """One row a node: what its DRAM slab holds."""
    rows = tuple(_tier_row(node) for node in sorted(nodes, key=lambda node: node.id))
    return Table(TIER_COLUMNS, rows, "No nodes have joined, so there is no pool.")


def _tier_row(node: Node) -> Row:
    size = node.block_bytes
    used = _product(node.used_blocks, size)
    capacity = _product(node.capacity_blocks, size)
    ratio = None if used is None or not capacity else used / capacity
    old = node.state != "ready" or is_old(node.heartbeat_age_seconds)
    tone: Tone = "stale" if old else "plain"
    held = (
        numbers.used_of(used, capacity),
        numbers.percent(ratio, unit=False),
        numbers.count(node.used_blocks),
        numbers.count(node.pinned_blocks),
        queue_text(node.write_queue_blocks, node.write_queue_bound),
    )
    cells = (
        cell(node.id, tone),
        cell(node.state, "critical" if node.state == "lost" else tone),
        *(Text(marked(text, old=old), tone) for text in held),
        Text(numbers.stored_bytes(size), tone),
    )
    facts = {"node": node.id, "state": node.state, "used": used, "pinned": node.pinned_blocks}
    return Row(node.id, cells, facts, f"node/{node.id}")


def queue_text(waiting: int | None, bound: int | None) -> str:
    """`118 / 500`."""
    if waiting is None and bound is None:
        return numbers.UNKNOWN
    return f"{numbers.count(waiting)} / {numbers.count(bound)}"


def _product(first: int | None, second: int | None) -> float | None:
    return None if first is None or second is None else float(first * second)


def _cut(series: SeriesReply, axis: TimeAxis) -> tuple[tuple[HeatColumn, ...], Values]:
    """Columns of the window, aligned to the clock, and each series' values in them."""
    step = _step(series, axis)
    wide = rebucket(series, step, axis.now)
    last = int(axis.now // step)
    num = max(1, int(axis.window_seconds // step))
    columns = tuple(_column(index, step, axis) for index in range(last - num + 1, last + 1))
    first = round(wide.start / step)
    offset = last - num + 1 - first
    values = {
        (s.source, s.metric): (
            [_at(s.values, offset + i) for i in range(num)],
            [_at(s.marks, offset + i) or "" for i in range(num)],
        )
        for s in wide.series
    }
    return columns, values


def _column(index: int, step: float, axis: TimeAxis) -> HeatColumn:
    start, end = index * step, (index + 1) * step
    is_open = end > axis.now
    span = f"{numbers.clock(start, axis.tz)} to {numbers.clock(end, axis.tz)}"
    return HeatColumn(
        f"{start:.0f}",
        numbers.clock(start, axis.tz, seconds=step < 60),
        start,
        end,
        is_open,
        f"{span} (open)" if is_open else span,
    )


def _end(columns: Sequence[HeatColumn], axis: TimeAxis) -> str:
    """Where the closed columns end: it changes once a bucket, not each second."""
    return numbers.clock(columns[-1].start if columns else axis.now, axis.tz)


def _step(series: SeriesReply, axis: TimeAxis) -> float:
    """Width of one column in seconds: a multiple of the series' own step."""
    wanted = bucket_for(axis.window_seconds, axis.num_columns)
    return max(1, round(wanted / series.step_seconds)) * series.step_seconds


def _at(items: Sequence[_T], place: int) -> _T | None:
    return items[place] if 0 <= place < len(items) else None


def _open_keys(columns: Sequence[HeatColumn]) -> list[str]:
    return [column.key for column in columns if column.is_open]


def _why_no_data(column: HeatColumn, node: Node | None, existed: bool) -> CellState:
    """`existed`: it has reported earlier, so it was there before it joined last."""
    if node is None or column.end is None or column.start is None:
        return "no_data"
    if not existed and column.end <= node.joined_at.timestamp():
        return "absent"
    gone = node.state != "ready" and column.end > node.last_heartbeat_at.timestamp()
    return "stale" if gone else "no_data"


def _seconds(column: HeatColumn, now: float) -> float:
    """What of the bucket has passed; the open one counts from its start."""
    if column.start is None or column.end is None:
        return 1.0
    return max(1.0, min(column.end, now) - column.start)


def _node_label(node: Node, workers: Sequence[Worker]) -> str:
    own = sorted(worker.id for worker in workers if worker.node_id == node.id)
    return f"{node.id} {own[0]}" if len(own) == 1 else node.id
