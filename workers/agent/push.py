"""Pushes blocks of a prefill leg to the decode node while prefill goes on (R26).

    a worker's `Push` ──▶ each block once it is stored ──▶ pinned here, reserved there, written there

The target weighs it against pulling, at the first run of blocks. Whatever goes wrong ends the push,
and the rest is the target's to pull, or to compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from workers.agent.peers import Peers
from workers.agent.reservations import ReservingNode
from workers.agent.session import Session
from workers.agent.transfers import NodeTransfers
from workers.client_async import AsyncAgentClient
from workers.core.errors import AgentUnavailableError, ProtocolError, RefusedError
from workers.core.ids import OwnerId
from workers.core.messages import Done, ReplyBody
from workers.core.owners import TooManyOwnersError
from workers.core.pool_state import ClientRef, PoolState
from workers.core.transfer_handshake import StaleIncarnationError
from workers.core.transfer_messages import Push, Reserve, Reserved, Unreserve
from workers.core.transfer_policy import mode_of
from workers.core.transfer_types import Direction, Piece, TransferRequest, TransferResult
from workers.transfer.engine import TransferEngine

MAX_PUSHES: Final = 256
BATCH_BYTES: Final = 8 << 20
IDLE_SECONDS: Final = 60.0
"""Without a new block of its chain a push ends: its prefill has failed, or waits for too long."""
RESERVED_SHARE: Final = 0.8
"""Of the time that the target keeps slots: our transfer is over before they are taken back."""
STOP_SECONDS: Final = 5.0
_Errors = (
    AgentUnavailableError, RefusedError, ProtocolError, TooManyOwnersError, ValueError,
)  # fmt: skip
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    body: Push
    owner: OwnerId  # of the pins here
    client: ClientRef
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_done: int = 0  # keys of the chain that the target has, or has slots for
    stopped: bool = False
    under_way: str = ""  # a transfer


class Pusher:
    """Runs in the agent's loop; `close` before the transfers are closed."""

    def __init__(self, node: ReservingNode, transfers: NodeTransfers, peers: Peers) -> None:
        self._node = node
        self._transfers = transfers
        self._peers = peers
        self._jobs: dict[str, _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_blocks = 0  # pushed

    def handlers(self) -> dict[type, Callable[[Session, Any], ReplyBody]]:
        return {Push: self.push}

    def push(self, session: Session, body: Push) -> ReplyBody:
        """Begin; `Done(1)` where it has."""
        node, engine = self._node, self._transfers.engine
        mine = body.target.node_id == node.node_id or not body.target.endpoint.startswith("tcp:")
        if engine is None or node.pool is None or mine or not body.block_hashes:
            return Done(0)
        forced = mode_of(self._transfers.policy, node.node_id, body.target.node_id)
        able = any(transport.pushes for transport in engine.transports.values())
        if forced == "pull" or not able or len(self._jobs) >= MAX_PUSHES:
            return Done(0)
        if body.owner not in self._jobs:
            number = next(self._transfers.numbers)
            client = ClientRef(self._transfers.connection(number))
            job = _Job(body, OwnerId(f"pushed:{node.node_id}:{number}"), client)
            self._jobs[body.owner] = job
            task = asyncio.get_running_loop().create_task(self._run(job, node.pool, engine))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return Done(1)

    def wake(self) -> None:
        """The pool has changed: blocks may have become readable."""
        for job in self._jobs.values():
            job.changed.set()

    def released(self, owner: str) -> None:
        """The request is over."""
        job, engine = self._jobs.get(owner), self._transfers.engine
        if job is not None:
            job.stopped = True
            job.changed.set()
            if job.under_way and engine is not None:
                engine.cancel(job.under_way)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one push ---------------------------------------------------------------------------

    async def _run(self, job: _Job, pool: PoolState, engine: TransferEngine) -> None:
        target = job.body.target
        try:
            client = self._peers.get(target)
            numbers = count(1)
            while not job.stopped and job.num_done < len(job.body.block_hashes):
                run = self._ready(job, pool)
                if run:
                    if not await self._send(job, pool, engine, client, run, next(numbers)):
                        return
                elif not await _changed(job):
                    return
        except _Errors as error:
            _log.warning("push_ended target=%s error=%s", target.node_id, error)
        finally:
            del self._jobs[job.body.owner]
            pool.release(job.owner, self._node.clock.monotonic())

    def _ready(self, job: _Job, pool: PoolState) -> list[bytes]:
        """The next blocks of the chain that can be read here, a batch of them at most."""
        most = max(1, BATCH_BYTES // max(1, pool.block_bytes))
        keys = job.body.block_hashes[job.num_done : job.num_done + most]
        job.changed.clear()
        return list(keys[: pool.peek(job.body.namespace, keys).num_held])

    async def _send(
        self,
        job: _Job,
        pool: PoolState,
        engine: TransferEngine,
        client: AsyncAgentClient,
        keys: list[bytes],
        number: int,
    ) -> bool:
        """One run of blocks; whether to go on."""
        here = pool.prepare_load(
            job.client, job.owner, job.body.namespace, keys, self._node.clock.monotonic()
        )
        pool.never_expires(job.owner)
        del keys[len(here) :]
        reply = await client.call(self._reserve(job, engine, keys), Reserved)
        welcome = client.welcome
        assert welcome is not None
        if reply.mode == "pull":
            return False
        if job.body.target.incarnation not in (0, welcome.incarnation):
            await _give_back(client, [slot for slot in reply.slots if slot is not None], False)
            raise StaleIncarnationError(
                welcome.node_id, job.body.target.incarnation, welcome.incarnation
            )
        engine.set_peer(self._transfers.peer(welcome))
        pieces = [
            Piece(there[0], there[1], ref.slot, ref.generation, key, pool.block_bytes)
            for key, ref, there in zip(keys, here, reply.slots, strict=False)
            if there is not None
        ]
        went_well = await self._write(job, engine, client, pieces, reply, f"{job.owner}.{number}")
        pool.release(job.owner, self._node.clock.monotonic())
        job.num_done += len(reply.slots)
        return went_well and len(reply.slots) == len(keys)

    def _reserve(self, job: _Job, engine: TransferEngine, keys: Sequence[bytes]) -> Reserve:
        body, first = job.body, job.num_done == 0
        cost = engine.best_cost(body.target.node_id, Direction.PUSH)
        parent = b"" if first else body.block_hashes[job.num_done - 1]
        return Reserve(
            body.owner, body.namespace, parent, list(keys), self._node.node_id, first,
            len(body.block_hashes), cost.latency_seconds, cost.bytes_per_second, body.tenant,
        )  # fmt: skip

    async def _write(
        self,
        job: _Job,
        engine: TransferEngine,
        client: AsyncAgentClient,
        pieces: list[Piece],
        reply: Reserved,
        name: str,
    ) -> bool:
        """Whether all of it is there. What is not is said to the target, which waits for it."""
        if not pieces:
            return True
        left = list(pieces)
        try:
            if not job.stopped:
                result = await self._transfer(job, engine, pieces, reply, name)
                left = [pieces[index] for index in result.missing]
                self.num_blocks += len(pieces) - len(left)
        finally:
            if left:
                slots = [(piece.remote_slot, piece.remote_generation) for piece in left]
                await _give_back(client, slots, job.stopped)
        return not left

    async def _transfer(
        self,
        job: _Job,
        engine: TransferEngine,
        pieces: list[Piece],
        reply: Reserved,
        name: str,
    ) -> TransferResult:
        target = job.body.target
        request = TransferRequest(
            name, target.node_id, tuple(pieces),
            self._node.clock.monotonic() + reply.seconds * RESERVED_SHARE,
            direction=Direction.PUSH, incarnation=target.incarnation,
        )  # fmt: skip
        future: Future[TransferResult] = engine.submit(request, among=reply.transports)
        job.under_way = name
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        finally:
            job.under_way = ""
            if not future.done():
                engine.cancel(name)
                await asyncio.to_thread(wait, [future], STOP_SECONDS)


async def _give_back(client: AsyncAgentClient, slots: list[tuple[int, int]], stopped: bool) -> None:
    """Say that these will not be written: whoever waits for them need not."""
    with contextlib.suppress(*_Errors):
        await client.call(Unreserve(slots, stopped), Done)


async def _changed(job: _Job) -> bool:
    """Wait for the pool to change; False: nothing has come for too long."""
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            await job.changed.wait()
    except TimeoutError:
        return False
    return True
