"""Replicate as a job: the destination's agent fetches blocks from the source's, verified there.

Where agents do not reach one another the bytes pass through the control plane in pieces, verified
at both ends. Both at a bounded rate. What the destination has is not sent again, so that a job that
begins anew goes on where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from controlplane.cache.agents import NodeAgent, NodeError, open_agent, targets
from controlplane.cache.context import JobContext, OperationError
from controlplane.cache.direct import DirectCopy, direct_copy
from controlplane.cache.pace import Pacer
from controlplane.cache.promotions import bring_to_memory, chains_meant
from controlplane.jobs.service import Outcome
from workers.core.cache_messages import (
    BlockPiece,
    BlockPieces,
    ChainKeys,
    ReadBlocks,
    WriteBlocks,
    WrittenBlocks,
)
from workers.core.messages import (
    CompleteStore,
    Done,
    Lookup,
    LookupReply,
    PreparedStore,
    PrepareStore,
    Release,
    Renew,
    SlotRef,
)

BATCH_BLOCKS = 16
RENEW_SECONDS = 5.0
ROOM_SECONDS = 5.0
"""How long the destination may have no room for a block, or be about to write it for another."""
RETRY_SECONDS = 0.1
MAX_STUCK = 3
MIB = 1 << 20


@dataclass(slots=True)
class Copied:
    """Blocks: sent (of these, straight from agent to agent), there already, gone at the source
    meanwhile, refused for want of room."""

    blocks: int = 0
    direct: int = 0
    bytes: int = 0
    held_already: int = 0
    missing: int = 0
    no_room: int = 0


class Copy:
    """Chains from `source` to `destination`, one after another."""

    def __init__(
        self,
        context: JobContext,
        source: NodeAgent,
        destination: NodeAgent,
        pacer: Pacer,
        direct: DirectCopy | None = None,
    ) -> None:
        self._context = context
        self._source = source
        self._destination = destination
        self._pacer = pacer
        self._direct = direct
        self._stuck = 0  # chains in a row of which nothing came directly
        self._owner = owner_of(context)
        self._renewed_at = 0.0
        self.sum = Copied()

    async def chain(self, chain: ChainKeys) -> None:
        """Copy what the destination lacks of one chain, head first. Raises NodeError.

        Pins and slots of a chain that does not come to its end go with our connections.
        """
        brought = await bring_to_memory(self._source, self._owner, chain)
        await self._send(chain, chain.block_hashes[: brought.num_held])
        self.sum.missing += len(chain.block_hashes) - brought.num_held
        await self._source.call(Release(self._owner), Done)
        await self._destination.call(Release(self._owner), Done)

    async def _send(self, chain: ChainKeys, keys: list[bytes]) -> None:
        there = await self._destination.call(Lookup(chain.namespace, keys), LookupReply)
        position = there.num_held + there.num_on_disk
        self.sum.held_already += position
        self._context.progress(position)
        position = await self._send_directly(chain, keys, position)
        while position < len(keys):
            await self._renew()
            batch = keys[position : position + BATCH_BLOCKS]
            parent = keys[position - 1] if position else b""
            slots = await self._slots(chain, parent, batch)
            if not slots:
                self.sum.no_room += len(keys) - position
                return
            for key, slot in zip(batch, slots, strict=False):
                if slot is not None and not await self._block(chain.namespace, key, slot):
                    await self._give_up(slots[batch.index(key) :])
                    self.sum.missing += len(keys) - position
                    return
                self.sum.held_already += slot is None
                position += 1
                self._context.progress(1, f"{self._source.node} > {self._destination.node}")

    async def _send_directly(self, chain: ChainKeys, keys: list[bytes], position: int) -> int:
        """From agent to agent, as far as that gets; where it goes on by the relay.

        What stops it once (no room, a damaged block) need not stop it at the next chain.
        """
        while self._direct is not None and position < len(keys):
            if self._stuck >= MAX_STUCK:
                return position
            await self._renew()
            try:
                reached = await self._direct.step(chain, keys, position)
            except TimeoutError:
                reached = position
            if reached == position:
                self._stuck += 1
                return position
            self._stuck = 0
            self.sum.blocks += reached - position
            self.sum.direct += reached - position
            self.sum.bytes += (reached - position) * self._direct.block_bytes
            self._context.progress(
                reached - position, f"{self._source.node} > {self._destination.node}"
            )
            position = reached
        return position

    async def _slots(
        self, chain: ChainKeys, parent: bytes, batch: list[bytes]
    ) -> list[SlotRef | None]:
        """Slots for the first blocks of a batch; None where one is there or on its way. Empty
        where there is no room in time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + ROOM_SECONDS
        body = PrepareStore(self._owner, chain.namespace, parent, batch, chain.tenant)
        while True:
            reply = await self._destination.call(body, PreparedStore)
            given = reply.slots[: len(batch) - reply.num_refused]
            if given or loop.time() > until:
                return given
            await asyncio.sleep(RETRY_SECONDS)

    async def _block(self, namespace: bytes, key: bytes, slot: SlotRef) -> bool:
        """Copy one block; False where it cannot be read any more, or did not arrive whole."""
        stored = 0
        async for piece in self._pieces(namespace, key):
            sent = BlockPiece(
                key,
                slot.slot,
                slot.generation,
                piece.checksum,
                piece.block_bytes,
                piece.offset,
                piece.data,
            )
            written = await self._destination.call(WriteBlocks([sent]), WrittenBlocks)
            if written.num_failed:
                return False
            stored += written.num_stored
            self.sum.bytes += len(piece.data)
            await self._pacer.pass_on(len(piece.data))
        self.sum.blocks += stored
        return bool(stored)

    async def _pieces(self, namespace: bytes, key: bytes) -> AsyncIterator[BlockPiece]:
        """A block's bytes in order; ends early where the source no longer has that generation."""
        offset, generation = 0, None
        while True:
            reply = await self._source.call(ReadBlocks(namespace, [key], offset), BlockPieces)
            piece = reply.pieces[0] if reply.pieces else None
            if piece is None or piece.offset != offset or not piece.data:
                return
            if generation not in (None, piece.generation):
                return
            generation = piece.generation
            yield piece
            offset += len(piece.data)
            if offset >= piece.block_bytes:
                return

    async def _give_up(self, slots: list[SlotRef | None]) -> None:
        left = [slot for slot in slots if slot is not None]
        await self._destination.call(CompleteStore(self._owner, [], left), Done)

    async def _renew(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._renewed_at > RENEW_SECONDS:
            self._renewed_at = now
            for agent in (self._source, self._destination):
                await agent.call(Renew([self._owner]), Done)


def owner_of(context: JobContext) -> str:
    """Of the pins that a job has while it copies, at both ends."""
    return f"replicate:{context.job_id}"


async def replicate(context: JobContext) -> Outcome:
    """Copy a chain, or the hottest ones of a selection."""
    [source] = targets(context.nodes, str(context.spec["source"]))
    [destination] = targets(context.nodes, str(context.spec["destination"]))
    pacer = Pacer(float(context.spec["mib_per_second"]) * MIB)
    async with open_agent(source) as reader, open_agent(destination) as writer:
        chains = await chains_meant(context, reader)
        if not chains:
            raise OperationError(
                f"Node {source.node} holds no such chain. "
                f"perilune cache list --node {source.node} shows what is there."
            )
        context.expect(sum(len(chain.block_hashes) for chain in chains))
        ends = context.nodes.find(source.node), context.nodes.find(destination.node)
        direct = direct_copy(*ends, writer, owner_of(context), pacer)
        copy = Copy(context, reader, writer, pacer, direct)
        for chain in chains:
            try:
                await copy.chain(chain)
            except NodeError as error:
                context.problems[error.node] = str(error)
                break
            finally:
                context.by_node[destination.node] = _figures(copy.sum)
    how = f"Purge the copies where they are not wanted: perilune cache purge KEY --node {destination.node}."
    return context.outcome({"how": how}, **_figures(copy.sum))


def _figures(copied: Copied) -> dict[str, object]:
    return {
        "blocks": copied.blocks,
        "direct": copied.direct,
        "bytes": copied.bytes,
        "held_already": copied.held_already,
        "missing": copied.missing,
        "no_room": copied.no_room,
    }
