"""Pulls blocks of another node into slots of this one, when a worker asks for them.

    slots reserved here -> blocks pinned there -> bytes pulled, a batch at a time -> readable here

A block that cannot be had is a failed write: it stops to be pending, and the worker computes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from workers.agent.peers import Peers
from workers.agent.pool_requests import short_tenant
from workers.agent.reservations import Reservations
from workers.agent.session import Session
from workers.agent.transfers import NodeTransfers
from workers.client_async import AsyncAgentClient
from workers.core.clock import Clock
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.ids import OwnerId
from workers.core.messages import (
    Done,
    LookupReply,
    PreparedLoad,
    PrepareLoad,
    ReplyBody,
    SlotRef,
    StoredSlot,
)
from workers.core.pool_state import ClientRef, PoolState
from workers.core.stats_messages import NamespaceSpec
from workers.core.transfer_handshake import StaleIncarnationError
from workers.core.transfer_messages import CancelFetch, Fetch
from workers.core.transfer_types import (
    PATH_CAUSES,
    Piece,
    Priority,
    TransferRequest,
    TransferResult,
)
from workers.transfer.engine import TransferEngine

STOP_SECONDS: Final = 5.0
LOCATE_SECONDS: Final = 1.0
PROMOTE_SECONDS: Final = 2.0
PROMOTE_POLL_SECONDS: Final = 0.01
MAX_FETCHES: Final = 256
MAX_WAITING: Final = 65_536
BATCH_BYTES: Final = 8 << 20
"""Blocks become readable in batches of about this size: decode starts on the first ones."""

_log = logging.getLogger(__name__)


class FetchingNode(Protocol):
    """What of the node is needed here."""

    clock: Clock
    namespaces: dict[bytes, NamespaceSpec]

    @property
    def pool(self) -> PoolState | None: ...
    @property
    def node_id(self) -> str: ...
    def publish(self) -> None:
        """Tell subscribers what changed."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One block and the slot that waits for it."""

    key: bytes
    slot: SlotRef


@dataclass(slots=True)
class _Asked:
    """A fetch that found blocks on their way by other means."""

    session: Session
    body: Fetch
    at: float


@dataclass(slots=True)
class _Job:
    body: Fetch
    owner: OwnerId
    client: ClientRef
    wanted: list[_Wanted]
    deadline: float


@dataclass(frozen=True, slots=True)
class _Again:
    """Pieces that their path lost, on their way by another; `lost` are their indices."""

    request: TransferRequest
    future: Future[TransferResult]
    lost: list[int]

    def joined(self, first: TransferResult, second: TransferResult) -> TransferResult:
        """The first one with what is missing after both."""
        missing = {i: cause for i, cause in first.missing.items() if i not in set(self.lost)}
        missing |= {self.lost[i]: cause for i, cause in second.missing.items()}
        return msgspec.structs.replace(first, missing=missing)


def _by_another_way(
    engine: TransferEngine, request: TransferRequest, result: TransferResult
) -> _Again | None:
    """Once, where the path is to blame and another one would be chosen now (a device that is gone,
    say). None: what is missing stays so, and is computed."""
    lost = [i for i, cause in result.missing.items() if cause in PATH_CAUSES]
    way = engine.other_way(request, result.link.transport) if lost else None
    if way is None:
        return None
    again = msgspec.structs.replace(
        request,
        transfer_id=f"{request.transfer_id}.{way}",
        pieces=tuple(request.pieces[i] for i in lost),
    )
    _log.info("fetch_by_another_way transfer=%s from=%s to=%s blocks=%d error=%s",
              request.transfer_id, result.link.transport, way, len(lost), result.detail)  # fmt: skip
    return _Again(again, engine.submit(again, transport=way), lost)


class Fetcher:
    """Runs in the agent's loop; `close` before the transfers are closed."""

    def __init__(
        self, node: FetchingNode, transfers: NodeTransfers, peers: Peers, pushes: Reservations
    ) -> None:
        self._node = node
        self._transfers = transfers
        self._peers = peers
        self._pushes = pushes
        self._tasks: dict[asyncio.Task[None], _Job] = {}
        self._waiting: OrderedDict[bytes, _Asked] = OrderedDict()
        pushes.on_failed = self._pull_instead
        self.counts = {"fetches": 0, "blocks_fetched": 0, "blocks_missing": 0, "refused": 0,
                       "blocks_cancelled": 0}  # fmt: skip

    def handlers(self) -> dict[type, Callable[[Session, Any], ReplyBody]]:
        return {Fetch: self.fetch, CancelFetch: self.cancel}

    def fetch(self, session: Session, body: Fetch) -> ReplyBody:
        """Begin; what is under way by then counts as pending in the reply."""
        pool = self._node.pool
        if pool is None or body.namespace not in self._node.namespaces:
            return LookupReply(0)
        self._pushes.asked_for(body.owner)
        found = pool.peek(body.namespace, body.block_hashes)
        if found.num_pending:
            self._wait(session, body, found)
        present = found.num_held + max(found.num_pending, found.num_on_disk)
        engine = self._transfers.engine
        if present >= len(body.block_hashes) or engine is None:
            return found
        is_peer = body.holder.node_id != self._node.node_id and body.holder.endpoint.startswith(
            "tcp:"
        )
        if len(self._tasks) >= MAX_FETCHES or not is_peer:
            self.counts["refused"] += 1
            return found
        self._begin(session, body, pool, present, engine)
        return pool.peek(body.namespace, body.block_hashes)

    def cancel(self, _: Session, body: CancelFetch) -> ReplyBody:
        """End this owner's fetches; each fails what it was still to write."""
        ended = 0
        for task, job in self._tasks.items():
            if job.body.owner == body.owner and not self._is_awaited(job):
                task.cancel()
                ended += len(job.wanted)
        self.counts["blocks_cancelled"] += ended
        return Done(ended)

    def _is_awaited(self, job: _Job) -> bool:
        """Whether somebody else than the job's owner has asked for what it brings."""
        owner, pool = job.body.owner, self._node.pool
        asked = (self._waiting.get(one.key) for one in job.wanted)
        if any(one is not None and one.body.owner != owner for one in asked):
            return True
        owners = (OwnerId(owner), job.owner)
        keys = job.body.block_hashes
        return pool is not None and pool.is_pinned_beside(job.body.namespace, keys, owners)

    async def close(self) -> None:
        """End every fetch and every connection to a peer."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- pushes that this node waits for ----------------------------------------------------

    def _wait(self, session: Session, body: Fetch, found: LookupReply) -> None:
        """Remember who waits for what is on its way, perhaps by a push."""
        for key in body.block_hashes[found.num_held : found.num_held + found.num_pending]:
            self._waiting[key] = _Asked(session, body, self._node.clock.monotonic())
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def _pull_instead(self, keys: Sequence[bytes]) -> None:
        """These will not be pushed: pull them at once, before anybody sees that they are missing."""
        now, patience = self._node.clock.monotonic(), self._transfers.policy.fetch_seconds
        asked = {id(one): one for key in keys if (one := self._waiting.pop(key, None)) is not None}
        bodies = {id(one.body): one for one in asked.values() if now - one.at < patience}
        for one in bodies.values():
            self.fetch(one.session, one.body)

    # --- one fetch --------------------------------------------------------------------------

    def _begin(
        self, session: Session, body: Fetch, pool: PoolState, present: int, engine: TransferEngine
    ) -> None:
        number, now = next(self._transfers.numbers), self._node.clock.monotonic()
        client = ClientRef(self._transfers.connection(number), body.holder.node_id)
        owner = OwnerId(f"fetch:{self._node.node_id}:{number}")
        parent = body.block_hashes[present - 1] if present else b""
        keys = body.block_hashes[present:]
        # This task ends the owner, whatever happens; no lease does, while bytes are on their way.
        prepared = pool.prepare_store(
            client, owner, body.namespace, parent, keys, now, short_tenant(body.tenant)
        )
        wanted = [
            _Wanted(key, slot)
            for key, slot in zip(keys, prepared.slots, strict=True)
            if slot is not None
        ]
        pool.pin_prefix(session.client, OwnerId(body.owner), body.namespace, body.block_hashes, now)
        if not wanted:
            pool.release(owner, now)
            return
        self.counts["fetches"] += 1
        pool.never_expires(owner)
        deadline = now + self._transfers.policy.fetch_seconds
        job = _Job(body, owner, client, wanted, deadline)
        task = asyncio.get_running_loop().create_task(self._run(pool, engine, job))
        self._tasks[task] = job
        task.add_done_callback(self._tasks.pop)

    async def _run(self, pool: PoolState, engine: TransferEngine, job: _Job) -> None:
        client, began = self._peers.get(job.body.holder), self._node.clock.monotonic()
        try:
            slots = await self._locate(client, job)
            welcome = client.welcome
            assert welcome is not None
            if job.body.holder.incarnation not in (0, welcome.incarnation):
                raise StaleIncarnationError(
                    welcome.node_id, job.body.holder.incarnation, welcome.incarnation
                )
            engine.set_peer(self._transfers.peer(welcome))
            pieces = [
                Piece(there.slot, there.generation, one.slot.slot, one.slot.generation, one.key,
                      pool.block_bytes)
                for one, there in zip(job.wanted, slots, strict=False)
            ]  # fmt: skip
            if await self._pull(pool, engine, job, pieces, welcome.incarnation):
                num_bytes = len(pieces) * pool.block_bytes
                took = self._node.clock.monotonic() - began
                self._pushes.pulled(job.body.holder.node_id, num_bytes, took)
        except (AgentUnavailableError, RefusedError, ProtocolError, ValueError) as error:
            holder = job.body.holder
            _log.warning("fetch_failed holder=%s error=%s", holder.node_id, error)
        finally:
            self._end(pool, job)
            with contextlib.suppress(AgentUnavailableError, RefusedError, ProtocolError):
                await client.release(job.owner)

    def _end(self, pool: PoolState, job: _Job) -> None:
        """What is still being written was not had."""
        before = pool.counters.store_failed_total
        pool.abandon_client(job.client.connection)
        self.counts["blocks_missing"] += pool.counters.store_failed_total - before
        pool.release(job.owner, self._node.clock.monotonic())
        self._node.publish()

    async def _locate(self, client: AsyncAgentClient, job: _Job) -> list[SlotRef]:
        """Pin the blocks at their holder; where they are. Those on its SSD are brought up first."""
        body = job.body
        keys = [one.key for one in job.wanted]
        load = PrepareLoad(job.owner, body.namespace, keys)
        located = await client.call(load, PreparedLoad, LOCATE_SECONDS)
        if len(located.slots) < len(keys):
            reply = await client.promote(job.owner, body.namespace, keys, body.urgency)
            if reply.num_on_disk or reply.num_pending:
                await self._promoted(client, job, keys)
                located = await client.call(load, PreparedLoad, LOCATE_SECONDS)
        return located.slots

    async def _promoted(self, client: AsyncAgentClient, job: _Job, keys: Sequence[bytes]) -> None:
        """Until all that the holder has of it is in its memory, or for as long as that may take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROMOTE_SECONDS):
                while True:
                    await asyncio.sleep(PROMOTE_POLL_SECONDS)
                    found = await client.lookup(job.body.namespace, keys)
                    if not found.num_on_disk and not found.num_pending:
                        return

    async def _pull(
        self,
        pool: PoolState,
        engine: TransferEngine,
        job: _Job,
        pieces: list[Piece],
        incarnation: int,
    ) -> bool:
        """Whether all of it came."""
        size = max(1, BATCH_BYTES // max(1, pool.block_bytes))
        batches = [pieces[start : start + size] for start in range(0, len(pieces), size)]
        requests = [
            TransferRequest(
                f"{job.owner}.{index}", job.body.holder.node_id, tuple(batch), job.deadline,
                Priority(job.body.urgency), incarnation=incarnation,
                piece_bytes=self._transfers.policy.piece_bytes,
            )
            for index, batch in enumerate(batches)
        ]  # fmt: skip
        futures: list[Future[TransferResult]] = []
        whole = True
        try:
            futures.extend(map(engine.submit, requests))
            for request, future in list(zip(requests, futures, strict=True)):
                result = await asyncio.shield(asyncio.wrap_future(future))
                if (again := _by_another_way(engine, request, result)) is not None:
                    requests.append(again.request)
                    futures.append(again.future)
                    second = await asyncio.shield(asyncio.wrap_future(again.future))
                    result = again.joined(result, second)
                self._landed(pool, list(request.pieces), result)
                whole = whole and not result.missing
        finally:
            # Only its end says that a transfer writes into no slot any more (I2).
            left = [future for future in futures if not future.done()]
            for request in requests if left else ():
                engine.cancel(request.transfer_id)
            await asyncio.to_thread(wait, left, STOP_SECONDS)
        return whole

    def _landed(self, pool: PoolState, batch: list[Piece], result: TransferResult) -> None:
        slab = self._transfers.slab
        stored, failed = [], []
        for index, piece in enumerate(batch):
            header = None if slab is None else slab.read_header(piece.local_slot)
            if index in result.missing or header is None:
                failed.append(SlotRef(piece.local_slot, piece.local_generation))
            else:
                stored.append(StoredSlot(piece.local_slot, piece.local_generation, header.checksum))
        pool.complete_store(self._node.clock.monotonic(), stored, failed)
        self.counts["blocks_fetched"] += len(stored)
        self.counts["blocks_missing"] += len(failed)
        self._node.publish()
