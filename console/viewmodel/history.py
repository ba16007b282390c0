"""Series as buckets aligned to the clock, filled from REST and kept up by ticks. Bounded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from console.viewmodel.numbers import known
from controlplane.stats.schemas import Series, SeriesReply

STEP_SECONDS = 10.0
NUM_BUCKETS = 91  # 15 min of closed buckets and the open one
MAX_SERIES = 6000

GAUGES = frozenset({
    "used_blocks", "capacity_blocks", "pinned_blocks", "write_queue_blocks", "running", "waiting",
    "ssd_used_bytes", "ssd_capacity_bytes",
})  # fmt: skip
BUCKETS_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600)


def is_gauge(metric: str) -> bool:
    """Gauges and percentiles merge by the worst; everything else is an increment and adds up."""
    return metric in GAUGES or "_p50_" in metric or "_p95_" in metric


def merge(metric: str, values: Iterable[float | None]) -> float | None:
    """Buckets into one. Nothing known is None, not 0."""
    seen = [number for number in map(known, values) if number is not None]
    if not seen:
        return None
    return max(seen) if is_gauge(metric) else sum(seen)


def bucket_for(window_seconds: float, num_columns: int) -> int:
    """The smallest of the fixed buckets with which the window fits the columns."""
    for bucket in BUCKETS_SECONDS:
        if window_seconds / bucket <= max(1, num_columns):
            return bucket
    return BUCKETS_SECONDS[-1]


def rebucket(reply: SeriesReply, bucket_seconds: float, end: float) -> SeriesReply:
    """Same series in wider buckets, aligned to the clock; the last one is open and holds `end`."""
    step = reply.step_seconds
    ratio = max(1, round(bucket_seconds / step))
    if not reply.series:
        return reply.model_copy(update={"step_seconds": ratio * step})
    first = math.floor(reply.start / step + 1e-6)
    length = max(len(series.values) for series in reply.series)
    last = max(first + length - 1, math.floor(end / step + 1e-6))
    head, tail = first // ratio, last // ratio
    merged = [_rebucket_one(series, first, ratio, head, tail) for series in reply.series]
    return SeriesReply(start=head * ratio * step, step_seconds=ratio * step, series=merged)


def _rebucket_one(series: Series, first: int, ratio: int, head: int, tail: int) -> Series:
    if ratio == 1:
        missing = tail - head + 1 - len(series.values)
        return series if missing <= 0 else _padded(series, missing)
    groups: list[list[float | None]] = [[] for _ in range(tail - head + 1)]
    marks = [""] * len(groups)
    for place, (value, mark) in enumerate(zip_longest(series.values, series.marks, fillvalue=None)):
        group = (first + place) // ratio - head
        groups[group].append(value if not isinstance(value, str) else None)
        marks[group] = str(mark) if mark else marks[group]
    values = [merge(series.metric, group) for group in groups]
    return Series(metric=series.metric, source=series.source, values=values, marks=marks)


def _padded(series: Series, missing: int) -> Series:
    values = [*series.values, *([None] * missing)]
    return Series(metric=series.metric, source=series.source, values=values, marks=series.marks)


@dataclass(slots=True)
class _Ring:
    """`values[i]` belongs to bucket `first + i`."""

    first: int
    values: list[float | None] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)

    def slot(self, index: int, limit: int) -> int | None:
        """Place of a bucket, after growing to it and dropping what is too old."""
        if index < self.first:
            return None
        missing = index - self.first - len(self.values) + 1
        if missing > limit:
            self.first, self.values, self.marks = index, [None], [""]
            return 0
        if missing > 0:
            self.values.extend([None] * missing)
            self.marks.extend([""] * missing)
        surplus = len(self.values) - limit
        if surplus > 0:
            del self.values[:surplus], self.marks[:surplus]
            self.first += surplus
        return index - self.first


class History:
    """Buckets of one width for many series. `load` sets what the server says, `add` ticks on."""

    def __init__(self, step_seconds: float = STEP_SECONDS, num_buckets: int = NUM_BUCKETS) -> None:
        self.step_seconds = step_seconds
        self.num_buckets = num_buckets
        self._rings: dict[tuple[str, str], _Ring] = {}
        self._newest = 0

    def __len__(self) -> int:
        return len(self._rings)

    def load(self, reply: SeriesReply) -> None:
        """Take the server's buckets over ours. A reply of another step is merged first."""
        if reply.step_seconds < self.step_seconds:
            reply = rebucket(reply, self.step_seconds, reply.start)
        first = math.floor(reply.start / self.step_seconds + 1e-6)
        for series in reply.series:
            ring = self._ring(series.source, series.metric, first)
            if ring is None:
                continue
            for place, value in enumerate(series.values):
                slot = ring.slot(first + place, self.num_buckets)
                if slot is not None:
                    ring.values[slot] = known(value)
                    ring.marks[slot] = series.marks[place] if place < len(series.marks) else ""
            self._newest = max(self._newest, first + len(series.values) - 1)

    def add(self, at: float, points: Mapping[str, Mapping[str, float | None]]) -> None:
        """One second's points: counters add to the open bucket, gauges keep the worst."""
        index = math.floor(at / self.step_seconds)
        self._newest = max(self._newest, index)
        for source, metrics in points.items():
            for metric, value in metrics.items():
                ring = self._ring(source, metric, index)
                slot = None if ring is None else ring.slot(index, self.num_buckets)
                if ring is not None and slot is not None:
                    ring.values[slot] = merge(metric, (ring.values[slot], value))

    def forget(self, source: str) -> None:
        """Drop a source that is gone for good."""
        for name in [name for name in self._rings if name[0] == source]:
            del self._rings[name]

    def frame(
        self, metrics: Sequence[str], source: str, *, end: float | None = None
    ) -> SeriesReply:
        """The shape of GET /stats/series; `source` may end in `*`. Ends at the open bucket."""
        last = self._newest if end is None else max(0, math.floor(end / self.step_seconds))
        first = max(0, last - self.num_buckets + 1)
        names = sorted(
            name for name in self._rings if name[1] in metrics and _matches(name[0], source)
        )
        series = [self._cut(name, first, last) for name in names]
        return SeriesReply(
            start=first * self.step_seconds, step_seconds=self.step_seconds, series=series
        )

    def _cut(self, name: tuple[str, str], first: int, last: int) -> Series:
        ring = self._rings[name]
        values: list[float | None] = []
        marks: list[str] = []
        for index in range(first, last + 1):
            place = index - ring.first
            inside = 0 <= place < len(ring.values)
            values.append(ring.values[place] if inside else None)
            marks.append(ring.marks[place] if inside else "")
        return Series(metric=name[1], source=name[0], values=values, marks=marks)

    def _ring(self, source: str, metric: str, index: int) -> _Ring | None:
        ring = self._rings.get((source, metric))
        if ring is None and len(self._rings) < MAX_SERIES:
            ring = self._rings[(source, metric)] = _Ring(index)
        return ring


def _matches(source: str, wanted: str) -> bool:
    return source.startswith(wanted[:-1]) if wanted.endswith("*") else source == wanted
