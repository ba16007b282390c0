"""What is learned of request classes: after how long blocks of a class come back, if at all.

A class is how often the block was reused before, whether the request went on from held blocks, and
the gateway's label. For each class and age we count the blocks that got that old and those that
came back at that age, evicted ones too, so that a small pool is not blind to late returns. A class
with few blocks leans on its parent: without the label, then by reuses alone, then all blocks.

The value of a class at an age is the best ratio, over horizons, of the chance that a block comes
back within the horizon to the time for which it is held until then (a Gittins index, in returns a
second).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

NUM_LEVELS: Final = 8
MAX_LABELS: Final = 64
EDGES: Final = [4.0 * 2.0 ** (step / 2) for step in range(19)]
"""Ages in seconds, 4 to 2048; between them lie the buckets."""
NUM_BUCKETS: Final = len(EDGES) + 1
_STARTS: Final = [0.0, *EDGES]
_WIDTHS: Final = [end - start for start, end in zip(_STARTS, [*EDGES, 4096.0], strict=True)]
_MAX_SEGMENTS: Final = 65_536
_USES_A_REBUILD: Final = 1024
_PRIOR_BLOCKS: Final = 50.0
_PRIOR: Final = [width / (width + 2 * start + 240.0) / 4 for start, width in zip(_STARTS, _WIDTHS, strict=True)]  # fmt: skip
"""Chance of a return in a bucket before anything was learned: it falls with age, as in LRU."""


class RequestClass(NamedTuple):
    level: int  # reuses before, at most NUM_LEVELS - 1
    continuing: bool  # new blocks of a request that went on from held ones
    label: str


class Segment:
    """Blocks of one class used at one time; `waiting` of them have not come back yet."""

    __slots__ = ("class_id", "start", "waiting")

    def __init__(self, class_id: int, start: float) -> None:
        self.class_id = class_id
        self.start = start
        self.waiting = 0


class ClassTables:
    """Counts and values by class. Policies of one pool share them."""

    def __init__(self, pseudo_blocks: float, half_life_seconds: float) -> None:
        self.pseudo_blocks = pseudo_blocks
        self.half_life_seconds = half_life_seconds
        self._ids: dict[RequestClass, int] = {}
        self._labels: set[str] = {""}
        self._reached: list[list[float]] = []
        self._returned: list[list[float]] = []
        self._values: list[list[float]] = []
        self._queues: list[deque[Segment]] = [deque() for _ in EDGES]
        self._num_segments = 0
        self._uses = 0
        self._now = -1.0
        self._faded_at = 0.0

    def class_of(self, uses: int, continuing: bool, label: str) -> int:
        """The number of a class; labels beyond MAX_LABELS count as none."""
        if label not in self._labels:
            if len(self._labels) < MAX_LABELS:
                self._labels.add(label)
            else:
                label = ""
        known = RequestClass(min(uses, NUM_LEVELS) - 1, continuing and uses == 1, label)
        number = self._ids.get(known)
        if number is None:
            number = self._ids[known] = len(self._ids)
            self._reached.append([0.0] * NUM_BUCKETS)
            self._returned.append([0.0] * NUM_BUCKETS)
            self._values.append(_values(_PRIOR))
        return number

    def value(self, class_id: int, age: float) -> float:
        """Returns a second that a block of this age is good for."""
        return self._values[class_id][bisect_right(EDGES, age)]

    def used(self, segment: Segment | None, class_id: int, now: float) -> Segment:
        """One more block was used; it joins `segment` where that is of its class and time."""
        if segment is None or segment.class_id != class_id or segment.start != now:
            segment = Segment(class_id, now)
            self._queues[0].append(segment)
            self._num_segments += 1
            if self._num_segments > _MAX_SEGMENTS:
                self._drop_oldest()
        segment.waiting += 1
        self._reached[class_id][0] += 1.0
        self._uses += 1
        return segment

    def came_back(self, segment: Segment, now: float) -> None:
        """A block of the segment is used again."""
        segment.waiting -= 1
        self._returned[segment.class_id][bisect_right(EDGES, now - segment.start)] += 1.0

    def advance(self, now: float) -> None:
        """Let blocks grow older; learn once in a while."""
        if now == self._now:
            return
        self._now = now
        for number, queue in enumerate(self._queues):
            edge = EDGES[number]
            while queue and queue[0].start + edge <= now:
                self._age(queue.popleft(), number + 1)
        if self._uses >= _USES_A_REBUILD:
            self._uses = 0
            self._fade(now)
            self.rebuild()

    def rebuild(self) -> None:
        """Values from the counts."""
        by_parent: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}
        for known, number in self._ids.items():
            for parent in _parents(known):
                reached, returned = by_parent.setdefault(
                    parent, ([0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS)
                )
                for bucket in range(NUM_BUCKETS):
                    reached[bucket] += self._reached[number][bucket]
                    returned[bucket] += self._returned[number][bucket]
        chances: dict[tuple[object, ...], list[float]] = {}
        for known, number in self._ids.items():
            above, weight = _PRIOR, _PRIOR_BLOCKS
            for parent in _parents(known):
                if parent not in chances:
                    chances[parent] = _shrunk(*by_parent[parent], above, weight)
                above, weight = chances[parent], self.pseudo_blocks
            own = _shrunk(self._reached[number], self._returned[number], above, weight)
            self._values[number] = _values(own)

    # --- inside -----------------------------------------------------------------------------

    def _age(self, segment: Segment, bucket: int) -> None:
        if segment.waiting > 0:
            self._reached[segment.class_id][bucket] += segment.waiting
            if bucket < len(self._queues):
                self._queues[bucket].append(segment)
                return
        self._num_segments -= 1

    def _drop_oldest(self) -> None:
        for queue in reversed(self._queues):
            if queue:
                queue.popleft()
                self._num_segments -= 1
                return

    def _fade(self, now: float) -> None:
        """Halve all counts once a half life, so that the tables follow the traffic."""
        if now - self._faded_at < self.half_life_seconds:
            return
        self._faded_at = now
        for counts in (*self._reached, *self._returned):
            counts[:] = [count / 2 for count in counts]


def _parents(known: RequestClass) -> list[tuple[object, ...]]:
    """From all blocks down to the class without its label."""
    return [(), (known.level,), (known.level, known.continuing)]


def _shrunk(
    reached: list[float], returned: list[float], above: list[float], weight: float
) -> list[float]:
    """Chance of a return in each bucket for what has reached it, leaning on `above`."""
    return [
        min(1.0, (back + weight * chance) / (blocks + weight))
        for blocks, back, chance in zip(reached, returned, above, strict=True)
    ]


def _values(chances: list[float]) -> list[float]:
    """The best ratio of returns to seconds held from each bucket on."""
    values = []
    for first in range(NUM_BUCKETS):
        best = returns = seconds = 0.0
        left = 1.0
        for bucket in range(first, NUM_BUCKETS):
            back = left * chances[bucket]
            seconds += (left - back / 2) * _WIDTHS[bucket]
            returns += back
            left -= back
            best = max(best, returns / seconds)
        values.append(best)
    return values
