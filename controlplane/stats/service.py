"""Statistics in motion: the collector, the window in memory, what waits for the database."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock
from controlplane.db.session import Database
from controlplane.decisions.join import KvOutcome
from controlplane.stats import repository
from controlplane.stats.bucket import Bucket, merged
from controlplane.stats.collector import Collector
from controlplane.stats.node_pairs import path_of
from controlplane.stats.pool_values import QUIET
from controlplane.stats.repository import Point
from controlplane.stats.schemas import PATHS, Matrix, Pair, Series, SeriesReply
from controlplane.stats.window import STEP_SECONDS, WINDOW_SECONDS, Frame, Window

KEEP_SECONDS = {1: 3600, STEP_SECONDS: 86_400}
MAX_WAITING = 200_000
"""Points kept for a database that does not answer: some minutes of a large cluster."""
POINTS_A_WRITE = 4000
"""Well under a second of the write lock."""


@dataclass(slots=True)
class StatsService:
    clock: Clock
    collector: Collector = field(default_factory=Collector)
    window: Window = field(default_factory=Window)
    last: Frame = field(default_factory=dict)
    last_at: int = 0
    _waiting: deque[Point] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))

    async def load(self, session: AsyncSession) -> None:
        """Fill the window from the database, so that a restart shows no hole before it."""
        now = int(self.clock.now().timestamp())
        start = now - now % STEP_SECONDS - WINDOW_SECONDS
        coarse = await repository.between(session, STEP_SECONDS, None, start, now + 1)
        self._feed(coarse)
        covered = max((point.at for point in coarse), default=start - STEP_SECONDS)
        fine = await repository.between(session, 1, None, covered + STEP_SECONDS, now + 1)
        self._feed(fine)

    def _feed(self, points: Iterable[Point]) -> None:
        for point in points:
            self._close(self.window.add(point.at, {point.source: point.bucket}))

    def second(self, at: int) -> None:
        """Close the second that began at `at`."""
        frame = self.collector.close(at)
        self.last, self.last_at = frame, at
        self._waiting.extend(Point(1, source, at, bucket) for source, bucket in frame.items())
        self._close(self.window.add(at, frame))

    def _close(self, done: tuple[int, Frame] | None) -> None:
        if done is not None:
            at, frame = done
            self._waiting.extend(Point(STEP_SECONDS, name, at, b) for name, b in frame.items())

    def take_outcome(self, outcome: KvOutcome) -> None:
        if outcome.decode_seconds is not None:  # a wait without its whole is no ratio
            self.collector.kv_wait(
                outcome.decode_worker,
                outcome.waited_seconds * outcome.weight,
                outcome.decode_seconds * outcome.weight,
            )
        if outcome.pair is not None:
            self.collector.transfer(
                outcome.pair,
                outcome.transfer_seconds,
                failed=outcome.transfer_failed,
                weight=outcome.weight,
            )

    def points(self) -> dict[str, dict[str, float]]:
        """The last closed second, by source and metric, for the tick."""
        return {
            source: {name: value for name, value in bucket.points().items() if name not in QUIET}
            for source, bucket in self.last.items()
        }

    async def flush(self, db: Database) -> None:
        """Write what waits now, a piece at a time: after an outage there may be a lot, other
        writers come in between, and what was written need not be written again. The rest waits."""
        for _ in range(math.ceil(len(self._waiting) / POINTS_A_WRITE)):
            points = list(itertools.islice(self._waiting, POINTS_A_WRITE))
            async with db.write() as tx:
                await repository.save(tx.session, points)
                tx.after_commit(partial(self._written, points))

    def _written(self, points: list[Point]) -> None:
        """The oldest may have made room for new ones meanwhile."""
        for point in points:
            if self._waiting and self._waiting[0] is point:
                self._waiting.popleft()

    async def prune(self, session: AsyncSession) -> None:
        now = int(self.clock.now().timestamp())
        for resolution, seconds in KEEP_SECONDS.items():
            await repository.prune(session, resolution, now - seconds)

    async def totals(self, db: Database, selector: str, seconds: float) -> dict[str, Bucket]:
        """Everything that happened in the last `seconds`, by source (`x:*` or one source)."""
        now = self.clock.now().timestamp()
        oldest = now - seconds
        if seconds <= WINDOW_SECONDS:
            names = (
                self.window.sources(selector[:-1], oldest) if selector.endswith("*") else {selector}
            )
            return {name: self.window.since(name, oldest) for name in names}
        async with db.read() as session:
            points = await repository.between(
                session, STEP_SECONDS, [selector], math.floor(oldest), math.ceil(now)
            )
        opened = self.window.open_frame()
        totals: dict[str, list[Bucket]] = {}
        for point in points:
            totals.setdefault(point.source, []).append(point.bucket)
        if opened is not None:
            for name, bucket in opened[1].items():
                if _matches(selector, name):
                    totals.setdefault(name, []).append(bucket)
        return {name: merged(buckets) for name, buckets in totals.items()}

    async def series(
        self,
        db: Database,
        metrics: list[str],
        selectors: list[str],
        *,
        window: int,
        step: int,
        end: float | None = None,
    ) -> SeriesReply:
        """Buckets of `step` seconds that cover `window` up to the one that holds `end` (now)."""
        until = self.clock.now().timestamp() if end is None else end
        stop = math.floor(until / step) * step + step
        count = max(1, window // step)
        start = stop - count * step
        resolution = 1 if step < STEP_SECONDS else STEP_SECONDS
        async with db.read() as session:
            points = await repository.between(session, resolution, selectors, start, stop)
        # by key, so that a point both waiting and written counts once
        known = {(p.source, p.at): p.bucket for p in points}
        for point in self._unwritten(resolution, selectors):
            if start <= point.at < stop:
                known[point.source, point.at] = point.bucket
        grid: dict[str, dict[int, list[Bucket]]] = {}
        for (source, at), bucket in known.items():
            grid.setdefault(source, {}).setdefault((at - start) // step, []).append(bucket)
        rows = [
            _series(metric, source, grid[source], count)
            for source in sorted(grid)
            for metric in metrics
        ]
        return SeriesReply(start=float(start), step_seconds=float(step), series=rows)

    def _unwritten(self, resolution: int, selectors: list[str]) -> list[Point]:
        found = [
            point
            for point in self._waiting
            if point.resolution == resolution and any(_matches(s, point.source) for s in selectors)
        ]
        opened = self.window.open_frame()
        if resolution == STEP_SECONDS and opened is not None:
            at, frame = opened
            found += [
                Point(resolution, name, at, bucket)
                for name, bucket in frame.items()
                if any(_matches(s, name) for s in selectors)
            ]
        return found

    async def matrix(self, db: Database, seconds: float) -> Matrix:
        """Every pair that moved anything in the last `seconds`."""
        totals = await self.totals(db, "pair:*", seconds)
        pairs = [_pair(name, bucket) for name, bucket in sorted(totals.items())]
        return Matrix(window_seconds=seconds, pairs=pairs)


def _matches(selector: str, source: str) -> bool:
    if selector.endswith("*"):
        return source.startswith(selector[:-1])
    return source == selector


def _series(metric: str, source: str, cells: dict[int, list[Bucket]], count: int) -> Series:
    values: list[float | None] = [None] * count
    marks = [""] * count
    for index, buckets in cells.items():
        bucket = buckets[0] if len(buckets) == 1 else merged(buckets)
        values[index] = bucket.value(metric)
        marks[index] = "R" if bucket.reset else ""
    return Series(metric=metric, source=source, values=values, marks=marks if any(marks) else [])


def _pair(name: str, bucket: Bucket) -> Pair:
    source, _, destination = name.removeprefix("pair:").partition(">")
    counters = bucket.counters
    path = path_of(counters)
    return Pair(
        source=source,
        destination=destination,
        path=path if path in PATHS else "shm",
        kind="worker" if path is None else "node",
        transfers=int(counters.get("transfers", 0)),
        bytes=int(counters.get("bytes", 0)),
        seconds=counters.get("seconds", 0.0),
        failures=int(counters.get("failures", 0)),
        p50_seconds=bucket.percentile("transfer", 0.50),
        p95_seconds=bucket.percentile("transfer", 0.95),
        p99_seconds=bucket.percentile("transfer", 0.99),
    )
