"""Ends tasks for good."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

AGAIN_SECONDS = 1.0


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel and wait until all have ended; how they ended is of no interest.

    They are cancelled more than once: a cancellation can be lost where a wait ends just then.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # looked at, so that asyncio does not complain of it
