"""Cancels a coroutine at one of its waits: what may be cancelled anywhere is tried at each."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class Cut:
    """Awaits `work` and cancels the awaiting task at its `at`-th wait, and at the `more` next ones.

    `waits` tells how many there were: fewer than `at` means that nothing was cancelled.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], at: int, more: int = 0) -> None:
        self._work, self._at, self._more = work, at, more
        self.waits = 0

    def __await__(self) -> Generator[Any, None, Any]:
        inner = self._work.__await__()
        task = asyncio.current_task()
        assert task is not None
        error: BaseException | None = None
        while True:
            try:
                future = inner.send(None) if error is None else inner.throw(error)
            except StopIteration as stop:
                return stop.value
            error = None
            self.waits += 1
            if self._at <= self.waits <= self._at + self._more:
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield future
            except BaseException as caught:
                error = caught


async def cut(work: Coroutine[Any, Any, Any], at: int, more: int = 0) -> bool:
    """Run `work` so; whether it got as far as to its `at`-th wait. Errors of its own are raised."""
    cutter = Cut(work, at, more)

    async def run() -> None:
        await cutter

    task = asyncio.create_task(run())
    done, _ = await asyncio.wait([task], timeout=30)
    assert done, f"cancelled at wait {at}, it runs on"
    if not task.cancelled():
        task.result()
    return cutter.waits >= at
