"""Loops that a gateway cannot do without: an error of ours is told, and they go on."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

import structlog

log = structlog.get_logger(__name__)

PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 30.0


async def lasting(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Runs until cancelled, or until `run` returns. Raises nothing else: a task that ends in silence
    leaves records unswept, stuck requests unseen, views unread."""
    pause = PAUSE_SECONDS
    while True:
        since = monotonic()
        try:
            await run()
        except Exception:
            if monotonic() - since > LONGEST_PAUSE_SECONDS:
                pause = PAUSE_SECONDS
            log.exception("loop_failed", loop=name, effect=f"begun again in {pause:g} s")
        else:
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


async def regularly(seconds: float, step: Callable[[float], None]) -> None:
    """`step` gets the time, monotonic. Runs until cancelled."""
    while True:
        await asyncio.sleep(seconds)
        step(monotonic())
