"""Purge as a job: in slices, until a whole walk over a node's index finds nothing more."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.cache.agents import NodeAgent, Target, open_agent
from controlplane.cache.context import JobContext
from controlplane.cache.selection import selection_of
from controlplane.jobs.service import Outcome
from workers.core.cache_messages import CHANGED_BLOCKS, PurgeChains, Slice

MAX_WALKS = 5
"""Who stores faster than a purge removes is not stopped by more walks."""
NOT_UNDOABLE = "A purge cannot be undone: what was purged is computed again when it is asked for."


@dataclass(slots=True)
class _Progress:
    """Blocks purged, of those that were there of the selection: on one node, within its job.

    What is left is asked anew with each slice, since others store and evict meanwhile. An older
    agent does not say it: then the job has no total.
    """

    context: JobContext
    node: str
    num_purged: int = 0
    num_expected: int | None = None

    def note(self, reply: Slice) -> None:
        self.num_purged += reply.num_blocks
        if reply.num_left is not None:
            self._expect(self.num_purged + reply.num_left)
        self.context.progress(reply.num_blocks, f"node {self.node}")

    def settle(self, num_kept: int) -> None:
        """At the end it is known what was there: what left, and what pins kept."""
        if self.num_expected is not None:
            self._expect(self.num_purged + num_kept)

    def _expect(self, num_blocks: int) -> None:
        change = num_blocks - (self.num_expected or 0)
        if change or self.num_expected is None:
            self.context.expect(change)
        self.num_expected = num_blocks


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
    num_in_use = 0
    progress = _Progress(context, agent.node)
    for _ in range(MAX_WALKS):
        found = await _walk(context, agent, progress)
        num_in_use += found.num_in_use
        if not found.num_blocks:
            break
    progress.settle(found.num_skipped)
    return {
        "blocks": progress.num_purged,
        "kept_by_pins": found.num_skipped,
        "in_use": num_in_use,
        "confirmed": not found.num_blocks and not found.num_skipped,
    }


async def _walk(context: JobContext, agent: NodeAgent, progress: _Progress) -> Slice:
    """One walk from end to end, summed up."""
    selection = selection_of(context.spec)
    include = bool(context.spec.get("include_pinned"))
    num_blocks = num_skipped = num_in_use = cursor = 0
    while True:
        body = PurgeChains(selection, cursor, CHANGED_BLOCKS, include)
        reply = await agent.call(body, Slice)
        progress.note(reply)
        num_blocks += reply.num_blocks
        num_skipped += reply.num_skipped
        num_in_use += reply.num_in_use
        if reply.cursor is None:
            return Slice(num_blocks, num_skipped, num_in_use)
        cursor = reply.cursor
