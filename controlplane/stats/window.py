"""The last quarter of an hour in memory, in steps of ten seconds. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from controlplane.stats.bucket import Bucket, merged, new_bucket

STEP_SECONDS = 10
WINDOW_SECONDS = 900
Frame = dict[str, Bucket]


@dataclass(slots=True)
class Window:
    """`add` buckets in order of time; a frame is closed once a later one begins."""

    _closed: deque[tuple[int, Frame]] = field(
        default_factory=lambda: deque(maxlen=WINDOW_SECONDS // STEP_SECONDS)
    )
    _open: Frame = field(default_factory=dict)
    _open_at: int | None = None

    def add(self, at: int, buckets: Frame) -> tuple[int, Frame] | None:
        """Take buckets that begin at `at`; returns the frame that this closed, if any."""
        start = at - at % STEP_SECONDS
        done: tuple[int, Frame] | None = None
        if self._open_at is not None and start > self._open_at:
            done = (self._open_at, self._open)
            self._closed.append(done)
            self._open = {}
        self._open_at = start if self._open_at is None else max(start, self._open_at)
        for source, bucket in buckets.items():
            self._open.setdefault(source, new_bucket()).merge(bucket)
        return done

    def open_frame(self) -> tuple[int, Frame] | None:
        """The frame still being filled."""
        return None if self._open_at is None else (self._open_at, self._open)

    def since(self, source: str, oldest: float) -> Bucket:
        """All of `source` in frames that end after `oldest`."""
        return merged(frame[source] for frame in self._frames(oldest) if source in frame)

    def sources(self, prefix: str, oldest: float) -> set[str]:
        return {name for frame in self._frames(oldest) for name in frame if name.startswith(prefix)}

    def first_at(self, oldest: float) -> float | None:
        """Start of the oldest frame with data after `oldest`."""
        starts = [at for at, frame in self._all() if at + STEP_SECONDS > oldest and frame]
        return max(float(min(starts)), oldest) if starts else None

    def _all(self) -> list[tuple[int, Frame]]:
        opened = self.open_frame()
        return [*self._closed, *([opened] if opened else [])]

    def _frames(self, oldest: float) -> list[Frame]:
        return [frame for at, frame in self._all() if at + STEP_SECONDS > oldest]
