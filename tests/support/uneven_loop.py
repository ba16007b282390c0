"""`PERILUNE_UNEVEN=7`: asyncio in the tests' processes runs as on a machine that is starved by chance.

Sockets become readable, timers fire and threads begin late, now and then, so that what usually
happens in one order happens in others too. A test that fails so waits for the wrong thing, or the
product does. The number seeds the chance; `PERILUNE_UNEVEN=7:0.04:400` is late one time in 25, by
up to 400 ms.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from random import Random
from typing import Any

USUAL = ("0.2", "30")
REST_SECONDS = 0.0005  # while all that is ready is held back: else the loop would spin


class Chance:
    """When something is late, and by how much: mostly little."""

    def __init__(self, seed: str, share: float, most_ms: float) -> None:
        self._chance = Random(f"{seed}-{os.environ.get('PYTEST_XDIST_WORKER', '')}")
        self._share = share
        self._most = most_ms / 1000

    def seconds(self) -> float:
        if self._chance.random() >= self._share:
            return 0.0
        return float(self._chance.random() ** 2 * self._most)


class UnevenLoop(asyncio.SelectorEventLoop):
    """asyncio's own, late by `chance`."""

    chance: Chance

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, float] = {}

    def _process_events(self, events: list[tuple[Any, int]]) -> None:
        wakes, now = self._ssock.fileno(), time.monotonic()  # type: ignore[attr-defined]
        ready = [
            event for event in events if event[0].fd == wakes or self._is_due(event[0].fd, now)
        ]
        if ready:
            super()._process_events(ready)  # type: ignore[misc]
        elif events and not self._ready:  # type: ignore[attr-defined]
            time.sleep(REST_SECONDS)

    def _is_due(self, fd: int, now: float) -> bool:
        """What is held back is ready again at the loop's next turn."""
        until = self._held.get(fd)
        if until is None:
            late = self.chance.seconds()
            if late:
                self._held[fd] = now + late
            return not late
        if now < until:
            return False
        del self._held[fd]
        return True

    def call_at(self, when: float, *rest: Any, **context: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        return super().call_at(when + self.chance.seconds(), *rest, **context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        late = self.chance.seconds()

        def begin(*args: Any) -> Any:
            time.sleep(late)
            return func(*args)

        return super().run_in_executor(executor, begin if late else func, *args)


class UnevenPolicy(asyncio.DefaultEventLoopPolicy):
    """Gives each who asks an uneven loop."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return UnevenLoop()


def install(wanted: str) -> None:
    """`wanted`: seed, or seed:share:milliseconds. Raises ValueError."""
    seed, *more = wanted.split(":")
    share, most_ms = more or USUAL
    UnevenLoop.chance = Chance(seed, float(share), float(most_ms))
    asyncio.set_event_loop_policy(UnevenPolicy())
