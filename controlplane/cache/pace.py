"""How fast an operation may move bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pacer:
    """Lets bytes through at a rate, measured over what went before."""

    bytes_per_second: float
    _due: float = field(default=0.0)

    async def pass_on(self, num_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._due = max(self._due, now) + num_bytes / self.bytes_per_second
        if self._due - now > 0.001:
            await asyncio.sleep(self._due - now)
