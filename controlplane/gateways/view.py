"""The cluster's revision: who waits for a newer one, and who has acknowledged which."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from controlplane.clock import Clock
from controlplane.errors import UnavailableError

ACKNOWLEDGE_SECONDS = 1.0
MAX_WAITERS = 512
MAX_ACKNOWLEDGED = 512


class ViewRevisions:
    """Revisions start at the boot time in milliseconds: none of an older life is ever reached
    again, so that an old number is never taken for an acknowledgement."""

    def __init__(self, clock: Clock) -> None:
        self.revision = int(clock.now().timestamp() * 1000)
        self._first = self.revision
        self._newer = asyncio.Event()
        self._moved = asyncio.Event()
        self._acknowledged: dict[str, int] = {}
        self._waiters = 0
        self._closed = False

    def bump(self) -> None:
        """Something that gateways act on has changed."""
        self.revision += 1
        self._newer.set()
        self._newer = asyncio.Event()

    def acknowledge(self, gateway_id: str, revision: int) -> None:
        """`gateway_id` acts on `revision`; numbers of an older life are ignored."""
        if not self._first <= revision <= self.revision:
            return
        if gateway_id not in self._acknowledged and len(self._acknowledged) >= MAX_ACKNOWLEDGED:
            self._acknowledged.pop(next(iter(self._acknowledged)))
        self._acknowledged[gateway_id] = max(revision, self._acknowledged.get(gateway_id, 0))
        self._moved.set()
        self._moved = asyncio.Event()

    async def newer_than(self, after: int | None, seconds: float) -> bool:
        """Wait until there is a newer revision; False when the time is over."""
        if after is None or after != self.revision:
            return True
        if self._waiters >= MAX_WAITERS:
            raise UnavailableError(
                f"{MAX_WAITERS} long polls are open, which is the limit.",
                way_out="Ask with wait=0.",
                headers={"Retry-After": "1"},
            )
        self._waiters += 1
        try:
            async with asyncio.timeout(0 if self._closed else seconds):
                await self._newer.wait()
        except TimeoutError:
            return False
        finally:
            self._waiters -= 1
        return self.revision != after

    async def acknowledged_by(
        self, gateway_ids: Iterable[str], seconds: float = ACKNOWLEDGE_SECONDS
    ) -> tuple[list[str], list[str]]:
        """Wait for these gateways to act on the present revision; (have, have not)."""
        wanted, revision = list(gateway_ids), self.revision

        def missing() -> list[str]:
            return [name for name in wanted if self._acknowledged.get(name, 0) < revision]

        try:
            async with asyncio.timeout(seconds):
                while missing():
                    await self._moved.wait()
        except TimeoutError:
            pass
        pending = missing()
        return [name for name in wanted if name not in pending], pending

    def close(self) -> None:
        """Answer every long poll now."""
        self._closed = True
        self._newer.set()
