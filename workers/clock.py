"""The machine's clock."""

import time


class SystemClock:
    """See `workers.core.clock.Clock`."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()  # noqa: TID251  the one place that reads it
