"""Servers that tests put in the place of others'."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from workers.listening import stop_listening

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PATIENCE_SECONDS = 10.0


class Serving:
    """Listens on the loopback; when it has stopped none of its connections is open, whatever was on
    its way: what is left open fails whichever test runs when it is collected."""

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make
        self._open: dict[asyncio.Protocol, asyncio.BaseTransport] = {}

    @classmethod
    def streams(cls, serve: Serve) -> Serving:
        """`serve` is called for each connection."""

        def make() -> asyncio.Protocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(), serve)

        return cls(make)

    async def start(self, port: int = 0) -> int:
        """Its port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._made, "127.0.0.1", port)
        found: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{found}"
        return found

    async def stop(self) -> None:
        if not self._server.is_serving():
            return
        await stop_listening(self._server)
        for transport in list(self._open.values()):
            transport.abort()  # type: ignore[attr-defined]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self._open:
                await asyncio.sleep(0.001)

    def _made(self) -> asyncio.Protocol:
        protocol = self._make()
        made, lost = protocol.connection_made, protocol.connection_lost

        def connection_made(transport: asyncio.BaseTransport) -> None:
            self._open[protocol] = transport
            made(transport)

        def connection_lost(error: Exception | None) -> None:
            del self._open[protocol]
            lost(error)

        protocol.connection_made = connection_made  # type: ignore[method-assign]
        protocol.connection_lost = connection_lost  # type: ignore[method-assign]
        return protocol
