"""Waiting to a fraction of a millisecond.

Timers of event loops tick in milliseconds: at a thousand requests a second what should come one by
one comes in pairs and threes, each millisecond, and their wait for one another would be taken for
the latency of who serves them.
"""

import asyncio
import contextlib
import ctypes
import os
import time
from types import TracebackType
from typing import Final, Self

_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC
_LEAST_NANOSECONDS: Final = 1  # zero would disarm the timer


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Pace:
    """A timer of the kernel's (timerfd), for one waiter at a time. Raises OSError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._file = self._library.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._rung: asyncio.Future[None] | None = None
        self._loop.add_reader(self._file, self._ring)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._loop.remove_reader(self._file)
        os.close(self._file)

    async def until(self, at: float) -> None:
        """Of `time.perf_counter()`; returns at once where that is past."""
        left = at - time.perf_counter()
        if left <= 0:
            return
        seconds = int(left)
        nanoseconds = max(_LEAST_NANOSECONDS, int((left - seconds) * 1e9))
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(seconds, nanoseconds))
        self._rung = self._loop.create_future()
        if self._library.timerfd_settime(self._file, 0, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await self._rung

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, 8)
            if self._rung is not None and not self._rung.done():
                self._rung.set_result(None)
