"""Connections to agents of other nodes, kept for the next question. Bounded."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from workers.client_async import AsyncAgentClient
from workers.client_base import make_hello
from workers.core.transfer_messages import HolderRef
from workers.transfer_tls import TlsFiles

CALL_SECONDS: Final = 1.0
MAX_PEERS: Final = 256


class Peers:
    """Clients by endpoint; the one that was not used for longest makes room."""

    def __init__(self, node_id: str, secret: bytes | None, tls: TlsFiles | None) -> None:
        self._node_id = node_id
        self._secret = secret
        self._tls = tls
        self._clients: OrderedDict[str, AsyncAgentClient] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, holder: HolderRef) -> AsyncAgentClient:
        """It connects when it is first called."""
        client = self._clients.get(holder.endpoint)
        if client is None:
            hello = make_hello("agent", self._node_id)
            client = AsyncAgentClient(
                holder.endpoint, hello, CALL_SECONDS, self._secret, self._tls or False
            )
            self._clients[holder.endpoint] = client
            if len(self._clients) > MAX_PEERS:
                _, oldest = self._clients.popitem(last=False)
                task = asyncio.get_running_loop().create_task(oldest.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        self._clients.move_to_end(holder.endpoint)
        return client

    async def close(self) -> None:
        clients, self._clients = list(self._clients.values()), OrderedDict()
        await asyncio.gather(*(client.close() for client in clients), *self._closing)
