"""Follows one node agent's event stream into a prefix index: gateways and the auditor alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from workers.client_async import AsyncAgentClient
from workers.core.errors import RefusedError
from workers.core.gateway_messages import GatewayShare
from workers.core.ids import NodeId
from workers.core.messages import LegReport
from workers.core.prefix_index import Applied, PrefixIndex

REFUSED_PAUSE_SECONDS = 5.0

log = structlog.get_logger(__name__)


class Feed:
    """Runs until cancelled. `node_id` is "" until the agent has said its name."""

    def __init__(
        self,
        client: AsyncAgentClient,
        index: PrefixIndex,
        on_leg: Callable[[LegReport], None] | None = None,
        on_share: Callable[[GatewayShare], None] | None = None,
    ) -> None:
        self.client = client
        self.node_id = ""
        self.num_resyncs = 0
        self._index = index
        self._on_leg = on_leg
        self._on_share = on_share

    async def run(self) -> None:
        """Reconnects by itself; a refused handshake is tried again after a pause."""
        while True:
            try:
                await self._follow()
            except RefusedError as refusal:
                log.warning("agent_refused", agent=self.client.address, reason=str(refusal))
                await asyncio.sleep(REFUSED_PAUSE_SECONDS)

    def resync(self) -> None:
        """Ask for a snapshot; until it came, what is believed stays in use."""
        self._index.mistrust(NodeId(self.node_id))
        self.client.resync()

    async def _follow(self) -> None:
        stream = self.client.subscribe(lambda: self._index.position(NodeId(self.node_id)))
        async with contextlib.aclosing(stream) as messages:  # type: ignore[type-var]  # it is an async generator
            async for message in messages:
                if isinstance(message, LegReport):
                    if self._on_leg is not None:
                        self._on_leg(message)
                    continue
                if isinstance(message, GatewayShare):
                    if self._on_share is not None:
                        self._on_share(message)
                    continue
                self.node_id = message.node_id
                if self._index.apply(message) is Applied.RESYNC:
                    self.num_resyncs += 1
                    self.client.resync()
