"""Replication without us in the middle: the destination's agent fetches from the source's.

Where that does not get on (no endpoint, no way between the two, no room), the relay takes over.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from controlplane.cache.agents import NodeAgent
from controlplane.cache.pace import Pacer
from controlplane.nodes.service import LiveNode
from workers.core.cache_messages import ChainKeys
from workers.core.messages import Lookup, LookupReply
from workers.core.transfer_messages import Fetch, HolderRef

BATCH_BLOCKS = 64
SETTLE_SECONDS = 20.0
"""An agent's fetch ends by itself before that."""
POLL_SECONDS = 0.02
BURST_SECONDS = 0.5
"""A batch is no more than the rate lets through in this time, or one block."""


@dataclass(slots=True)
class DirectCopy:
    """Batches of one chain after another, at the pacer's rate."""

    holder: HolderRef
    destination: NodeAgent
    owner: str
    block_bytes: int
    pacer: Pacer

    @property
    def batch(self) -> int:
        most = int(self.pacer.bytes_per_second * BURST_SECONDS / max(1, self.block_bytes))
        return max(1, min(BATCH_BLOCKS, most))

    async def step(self, chain: ChainKeys, keys: list[bytes], position: int) -> int:
        """Fetch the next batch behind `position`; how many blocks the destination has by then.

        `position` again where nothing came. Raises NodeError where the destination is gone.
        """
        wanted = keys[: position + self.batch]
        fetch = Fetch(
            self.owner, chain.namespace, wanted, self.holder, chain.tenant, urgency="batch"
        )
        await self.destination.call(fetch, LookupReply)
        found = await self._settled(chain.namespace, wanted)
        arrived = found.num_held + found.num_on_disk - position
        if arrived <= 0:
            return position
        await self.pacer.pass_on(arrived * self.block_bytes)
        return position + arrived

    async def _settled(self, namespace: bytes, keys: list[bytes]) -> LookupReply:
        """When nothing is under way any more."""
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                found = await self.destination.call(Lookup(namespace, keys), LookupReply)
                if not found.num_pending:
                    return found
                await asyncio.sleep(POLL_SECONDS)


def direct_copy(
    source: LiveNode, destination: LiveNode, agent: NodeAgent, owner: str, pacer: Pacer
) -> DirectCopy | None:
    """None where one of the two has no endpoint for other nodes, or takes no part in transfers."""
    here, there = source.stats, destination.stats
    if here is None or there is None or not here.endpoint or not there.endpoint:
        return None
    holder = HolderRef(source.id, here.endpoint, source.incarnation)
    return DirectCopy(holder, agent, owner, here.block_bytes, pacer)
