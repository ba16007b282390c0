"""Purge as a job: in slices, until a whole walk over a node's index finds nothing more."""

from __future__ import annotations

from controlplane.cache.agents import NodeAgent, Target, open_agent
from controlplane.cache.context import JobContext
from controlplane.cache.selection import selection_of
from controlplane.jobs.service import Outcome
from workers.core.cache_messages import CHANGED_BLOCKS, PurgeChains, Slice

MAX_WALKS = 5
"""Who stores faster than a purge removes is not stopped by more walks."""
NOT_UNDOABLE = "A purge cannot be undone: what was purged is computed again when it is asked for."


async def purge(context: JobContext) -> Outcome:
    """Withdraw a selection on every node; `confirmed`: a last walk found none of it left."""

    async def act(target: Target) -> dict[str, object]:
        async with open_agent(target) as agent:
            return await _purge_here(context, agent)

    await context.on_each(act)
    figures = {name: context.sum(name) for name in ("blocks", "kept_by_pins", "in_use")}
    confirmed = not context.problems and all(f["confirmed"] for f in context.by_node.values())
    return context.outcome({"how": NOT_UNDOABLE}, **figures, confirmed=confirmed)


async def _purge_here(context: JobContext, agent: NodeAgent) -> dict[str, object]:
    num_blocks = num_in_use = 0
    for walk in range(MAX_WALKS):
        found = await _walk(context, agent, count=walk == 0)
        num_blocks += found.num_blocks
        num_in_use += found.num_in_use
        if not found.num_blocks:
            break
    return {
        "blocks": num_blocks,
        "kept_by_pins": found.num_skipped,
        "in_use": num_in_use,
        "confirmed": not found.num_blocks and not found.num_skipped,
    }


async def _walk(context: JobContext, agent: NodeAgent, *, count: bool) -> Slice:
    """One walk from end to end, summed up. The first counts as progress: blocks looked at."""
    selection = selection_of(context.spec)
    include = bool(context.spec.get("include_pinned"))
    num_blocks = num_skipped = num_in_use = cursor = 0
    while True:
        body = PurgeChains(selection, cursor, CHANGED_BLOCKS, include)
        reply = await agent.call(body, Slice)
        if count and not cursor and not num_blocks:
            context.expect(reply.total_blocks)
        num_blocks += reply.num_blocks
        num_skipped += reply.num_skipped
        num_in_use += reply.num_in_use
        if count:
            looked_at = CHANGED_BLOCKS if reply.cursor is not None else _rest(context)
            context.progress(min(looked_at, _rest(context)), f"node {agent.node}")
        if reply.cursor is None:
            return Slice(num_blocks, num_skipped, num_in_use)
        cursor = reply.cursor


def _rest(context: JobContext) -> int:
    return max(0, (context.total or 0) - context.done)
