"""Time as an argument: services take a `Clock`, tests give one that stands still."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """`now` for what people read, `monotonic` for ages and deadlines."""

    def now(self) -> datetime:
        """Aware UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()
