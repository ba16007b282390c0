"""Lists that the nodes' agents are asked for: chains and pins. Bounded in time and in calls."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from controlplane.cache.agents import NodeAgent, NodeError, Target, hottest_chains, open_agent
from controlplane.cache.names import tenant_name
from controlplane.cache.schemas import CacheChain, CacheChainList, CachePinList, CachePinned
from controlplane.clock import Clock
from controlplane.nodes.service import LiveNode, NodeRegistry
from workers.core.cache_messages import (
    ChainInfo,
    ChainPage,
    ListChains,
    ListPins,
    PinInfo,
    PinList,
    Selection,
)

READ_SECONDS = 4.0
MAX_CALLS = 64


class Walk:
    """Chains of several nodes, node after node; its cursor is `NODE:POSITION`."""

    def __init__(self, nodes: NodeRegistry, selection: Selection, limit: int) -> None:
        self._nodes = nodes
        self._selection = selection
        self._limit = limit
        self._calls = 0
        self._items: list[CacheChain] = []
        self._unreachable: dict[str, str] = {}

    async def page(self, targets: list[Target], cursor: tuple[str, int] | None) -> CacheChainList:
        """From the cursor on, up to the limit; a short page where time or calls ran out."""
        ordered = sorted(targets, key=lambda target: target.node)
        start, position = cursor or ("", 0)
        stopped: str | None = None
        async with asyncio.timeout(READ_SECONDS + 10):  # beyond every call's own bound
            until = asyncio.get_running_loop().time() + READ_SECONDS
            for target in ordered:
                if target.node < start:
                    continue
                first = position if target.node == start else 0
                left_at = await self._node(target, first, until)
                if left_at is not None:
                    stopped = f"{target.node}:{left_at}"
                    break
        return CacheChainList(
            items=self._items,
            next_cursor=stopped,
            complete=stopped is None and not self._unreachable,
            unreachable=self._unreachable,
        )

    async def _node(self, target: Target, position: int, until: float) -> int | None:
        """Where to go on; None when the node has been walked to its end."""
        loop = asyncio.get_running_loop()
        try:
            async with open_agent(target) as agent:
                while True:
                    room = self._limit - len(self._items)
                    if not room or self._calls >= MAX_CALLS or loop.time() > until:
                        return position
                    self._calls += 1
                    body = ListChains(self._selection, position, room)
                    page = await agent.call(body, ChainPage)
                    self._items += [chain_row(self._nodes, agent, info) for info in page.chains]
                    if page.cursor is None:
                        return None
                    position = page.cursor
        except NodeError as error:
            self._unreachable[target.node] = str(error)
            return None


async def hottest(
    nodes: NodeRegistry, targets: list[Target], selection: Selection, limit: int
) -> CacheChainList:
    """The chains with most uses over these nodes."""
    rows: list[CacheChain] = []
    unreachable: dict[str, str] = {}
    complete = True
    for target in targets:
        try:
            async with asyncio.timeout(READ_SECONDS), open_agent(target) as agent:
                found = await hottest_chains(agent, selection, limit)
                rows += [chain_row(nodes, agent, info) for info in found]
        except NodeError as error:
            unreachable[target.node] = str(error)
        except TimeoutError:
            complete = False
    rows.sort(key=lambda row: row.hits or 0, reverse=True)
    complete = complete and not unreachable
    return CacheChainList(items=rows[:limit], complete=complete, unreachable=unreachable)


async def pins(
    nodes: NodeRegistry, clock: Clock, targets: list[Target], selection: Selection
) -> CachePinList:
    """Operators' pins on these nodes."""
    rows: list[CachePinned] = []
    unreachable: dict[str, str] = {}
    for target in targets:
        try:
            async with open_agent(target) as agent:
                reply = await agent.call(ListPins(selection), PinList)
        except NodeError as error:
            unreachable[target.node] = str(error)
            continue
        rows += [_pin_row(nodes, clock, target, reply, info) for info in reply.pins]
    rows.sort(key=lambda row: (row.name, row.node))
    return CachePinList(items=rows, unreachable=unreachable)


def chain_row(nodes: NodeRegistry, agent: NodeAgent, info: ChainInfo) -> CacheChain:
    node = nodes.find(agent.node)
    block_bytes = _block_bytes(node)
    block_tokens = node.block_tokens
    on_disk = info.num_on_disk
    return CacheChain(
        node=agent.node,
        namespace=info.namespace.hex(),
        tenant=tenant_name(info.tenant),
        head=info.head.hex(),
        key=info.tip.hex(),
        blocks=info.num_blocks,
        tokens=None if block_tokens is None else block_tokens * info.num_blocks,
        bytes=None if block_bytes is None else block_bytes * info.num_blocks,
        blocks_on_disk=on_disk,
        tier="dram" if not on_disk else "ssd" if on_disk == info.num_blocks else "both",
        pins=info.pins,
        pinned_by=info.pinned_by,
        hits=info.hits,
        idle_seconds=info.idle_seconds,
    )


def _pin_row(
    nodes: NodeRegistry, clock: Clock, target: Target, reply: PinList, info: PinInfo
) -> CachePinned:
    block_bytes = _block_bytes(nodes.find(target.node))
    left = info.expires_in_seconds
    return CachePinned(
        name=info.name,
        node=target.node,
        blocks=info.num_blocks,
        bytes=None if block_bytes is None else block_bytes * info.num_blocks,
        share=info.num_blocks / reply.capacity_blocks if reply.capacity_blocks else None,
        expires_at=None if left is None else clock.now() + timedelta(seconds=left),
        keys=[tip.hex() for tip in info.tips],
        chains=info.num_tips,
    )


def _block_bytes(node: LiveNode) -> int | None:
    return node.stats.block_bytes if node.stats is not None else None
