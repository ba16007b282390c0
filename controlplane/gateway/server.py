"""The gateway's listener: its connections, their bounds, and how it ends."""

import asyncio
import contextlib
from collections.abc import Callable

from controlplane.gateway.client_connection import LINGER_SECONDS, ClientConnection, Handler
from controlplane.gateway.settings import Limits, Timeouts
from workers.listening import stop_listening

SWEEP_SECONDS = 1.0
BACKLOG = 4096
"""Connections that may come at once (the kernel's own bound is net.core.somaxconn): those beyond it
try again only after a second."""


class Server:
    """Listens, sweeps, drains. `stop` ends everything within `timeouts.drain`."""

    def __init__(self, handler: Handler, limits: Limits, timeouts: Timeouts) -> None:
        self.handler = handler
        self.limits = limits
        self.timeouts = timeouts
        self.draining = self.is_ending = False
        self.on_overdue: Callable[[], None] = lambda: None  # the drain has been too short
        self.loop = asyncio.get_running_loop()
        self.connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._all_idle = asyncio.Event()
        self.port = 0

    def add(self, connection: ClientConnection) -> bool:
        """False when there are too many; it is counted all the same until it is closed."""
        self.connections.add(connection)
        return len(self.connections) <= self.limits.max_connections

    def remove(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        if connection.is_lingering:
            self.request_ended()

    def request_ended(self) -> None:
        if self.draining and not any(one.is_busy or one.is_lingering for one in self.connections):
            self._all_idle.set()

    async def start(self, host: str, port: int) -> None:
        """Raises OSError when the address is taken."""
        self._server = await self.loop.create_server(
            lambda: ClientConnection(self), host, port, backlog=BACKLOG
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._sweeper = self.loop.call_later(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in list(self.connections):
            connection.sweep(now, self.timeouts)
        self._sweeper = self.loop.call_later(SWEEP_SECONDS, self._sweep)

    async def _end_all(self) -> None:
        """Those that still run are told why, as far as they read at all."""
        self.is_ending = True
        self.on_overdue()
        for connection in list(self.connections):
            connection.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_idle.wait(), LINGER_SECONDS)

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Stop listening, let running requests end (bounded), then cancel the rest."""
        if self._server is None:
            return
        self.draining = True
        await stop_listening(self._server)
        bound = self.timeouts.drain if drain_seconds is None else drain_seconds
        for connection in list(self.connections):
            connection.drain()
        self.request_ended()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_idle.wait(), bound)
        if not self._all_idle.is_set():
            await self._end_all()
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.sleep(0)
        self._server = None
