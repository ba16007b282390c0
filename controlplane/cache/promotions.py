"""Prefetch as a job: chains from SSD into memory, and what both it and a copy need for that."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from controlplane.cache.agents import NodeAgent, Target, hottest_chains, open_agent
from controlplane.cache.context import JobContext, OperationError
from controlplane.cache.selection import selection_of
from controlplane.jobs.service import Outcome
from workers.core.cache_messages import ChainKeys, GetChain
from workers.core.messages import Done, Lookup, LookupReply, Promote, Release, Renew

POLL_SECONDS = 0.02
PATIENCE_SECONDS = 30.0
"""For one chain to come from SSD without a block arriving."""
NO_ROOM_SECONDS = 2.0
"""How long memory may have no room for the next block of a chain."""
RENEW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Brought:
    """`num_held` blocks from the head are in memory now, `num_promoted` of them by us."""

    num_held: int
    num_promoted: int
    num_on_disk: int


async def prefetch(context: JobContext) -> Outcome:
    """Promote a chain, or the hottest ones of a selection, on every node asked for."""

    async def act(target: Target) -> dict[str, object]:
        async with open_agent(target) as agent:
            return await _prefetch_here(context, agent)

    await context.on_each(act)
    figures = {name: context.sum(name) for name in ("promoted", "in_memory", "left_on_disk")}
    if not context.sum("chains") and not context.problems:
        raise OperationError("No node holds such a chain. perilune cache list shows what is there.")
    how = "There is nothing to take back: what memory needs goes out by the eviction policy."
    return context.outcome({"how": how}, **figures)


async def chains_meant(context: JobContext, agent: NodeAgent) -> list[ChainKeys]:
    """The keys of the chain asked for, or of the hottest of the selection."""
    key = context.spec.get("key")
    ends = [bytes.fromhex(key)] if key else []
    if not key:
        count = int(context.spec["hottest"])
        chains = await hottest_chains(agent, selection_of(context.spec), count)
        ends = [chain.tip for chain in chains]
    found = [await agent.call(GetChain(end), ChainKeys) for end in ends]
    return [chain for chain in found if chain.block_hashes]


async def bring_to_memory(agent: NodeAgent, owner: str, chain: ChainKeys) -> Brought:
    """Have a chain in memory as far as there is room, pinned for `owner` until it is released."""
    loop = asyncio.get_running_loop()
    keys = chain.block_hashes
    first = await agent.call(Promote(owner, chain.namespace, keys, "batch"), LookupReply)
    held, moved_at, renewed_at = first.num_held, loop.time(), loop.time()
    state = first
    while state.num_on_disk:
        await asyncio.sleep(POLL_SECONDS)
        now = loop.time()
        state = await agent.call(Lookup(chain.namespace, keys), LookupReply)
        if state.num_held > held:
            held, moved_at = state.num_held, now
        patience = PATIENCE_SECONDS if state.num_pending else NO_ROOM_SECONDS
        if now - moved_at > patience:
            break
        if now - renewed_at > RENEW_SECONDS or not state.num_pending:
            renewed_at = now
            await agent.call(Renew([owner]), Done)
            await agent.call(Promote(owner, chain.namespace, keys, "batch"), LookupReply)
    return Brought(state.num_held, state.num_held - first.num_held, state.num_on_disk)


async def _prefetch_here(context: JobContext, agent: NodeAgent) -> dict[str, object]:
    chains = await chains_meant(context, agent)
    context.expect(sum(len(chain.block_hashes) for chain in chains))
    promoted = held = left = 0
    owner = f"prefetch:{context.job_id}"
    for chain in chains:
        brought = await bring_to_memory(agent, owner, chain)
        await agent.call(Release(owner), Done)
        promoted += brought.num_promoted
        held += brought.num_held
        left += brought.num_on_disk
        context.progress(len(chain.block_hashes), f"node {agent.node}")
    return {
        "chains": len(chains),
        "promoted": promoted,
        "in_memory": held,
        "left_on_disk": left,
    }
