"""What a step computed goes to the pool: asked for in one round trip, copied, published later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from workers.connector.backlog import Backlog, KeptRun
from workers.connector.layout import PagedKv
from workers.connector.metadata import StoreOrder, StoreResult
from workers.connector.session import AgentSession
from workers.connector.settings import ConnectorSettings
from workers.connector.slots import SlabSlots
from workers.connector.staging import Outgoing
from workers.connector.store import Publisher, Written
from workers.core.messages import (
    CompleteStore,
    Done,
    PreparedStore,
    PrepareStore,
    Release,
    ReplyBody,
    RequestBody,
    SlotRef,
)

logger = logging.getLogger(__name__)

ALARM_SHARE = 0.7
_NULL_BLOCK = 0  # vLLM's placeholder for blocks that hold nothing
_FIRST_BOUND = 500  # of the pool's write queue, until it says
_BLOCK_SECONDS = 0.00025
"""A tenth of what it takes to compute one: a step that computed much may wait longer for the agent,
as leg 2 computes again what it does not find."""

Answer = PreparedStore | Literal["late"] | None  # None: not asked


class Storer:
    """`store` comes from the worker's main thread; `slots` gives the slab as it is now.

    All of a step's orders together wait for the agent no longer than `store_step_seconds`, and a
    little more for each block: what it has not answered by then, and what it refuses, goes through
    the backlog.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        session: AgentSession,
        paged: PagedKv,
        slots: Callable[[], SlabSlots | None],
    ) -> None:
        self._settings = settings
        self._session = session
        self._paged = paged
        self._slots = slots
        self._retry_owner = f"store:{settings.worker_id}:retry"
        self._queue = (0, _FIRST_BOUND)
        self._alarm = False
        self.alarms = 0
        self.backlog = Backlog(
            paged.block_bytes, settings.store_backlog_bytes, settings.store_retry_seconds
        )
        self.publisher = Publisher(
            self._complete,
            bound_blocks=settings.store_queue_blocks,
            retry=lambda: self.backlog.retry(self._offer, time.monotonic()),
        )
        self.publisher.start()

    def close(self) -> None:
        self.publisher.close()

    def store(self, orders: Sequence[StoreOrder]) -> list[StoreResult]:
        """Copy what the pool lacks, while the device still holds it."""
        if not orders:
            return []
        answers = self._ask(orders)
        results = [self._take(order, answer) for order, answer in zip(orders, answers, strict=True)]
        self._watch_queue()
        return results

    @property
    def queue_share(self) -> float:
        """How full the pool's write queue or the backlog is, 0 to 1."""
        waiting, bound = self._queue
        return max(waiting / max(1, bound), self.backlog.share)

    # --- a step's orders ----------------------------------------------------------------------

    def _ask(self, orders: Sequence[StoreOrder]) -> list[Answer]:
        """Chains whose former part is in the backlog go there too: the pool lacks their parent."""
        answers: list[Answer] = [None] * len(orders)
        asked = [i for i, order in enumerate(orders) if not self.backlog.follows(order.parent)]
        if not asked or self._slots() is None:
            return answers
        bodies = [
            PrepareStore(o.owner, o.namespace, o.parent, list(o.block_hashes), o.tenant)
            for o in (orders[index] for index in asked)
        ]
        num_blocks = sum(len(body.block_hashes) for body in bodies)
        patience = self._settings.store_step_seconds + num_blocks * _BLOCK_SECONDS
        found = self._session.try_many(bodies, PreparedStore, patience, self._on_late)
        for index, answer in zip(asked, found or (), strict=False):
            answers[index] = answer or "late"
        return answers

    def _take(self, order: StoreOrder, answer: Answer) -> StoreResult:
        result = StoreResult(order.request_id)
        total = len(order.block_hashes)
        accepted = 0
        if isinstance(answer, PreparedStore):
            self._queue = answer.write_queue
            accepted = total - answer.num_refused
            self._write(order, answer.slots[:accepted], result)
        if not order.owner.startswith("transfer:"):
            # No leg waits for these blocks: the writing goes on without pins.
            self._session.post(Release(order.owner))
        if accepted < total:
            self._keep(order, accepted, answer == "late", result)
        return result

    def _keep(self, order: StoreOrder, start: int, asked: bool, result: StoreResult) -> None:
        num_left = len(order.block_hashes) - start
        per_block = self._settings.pages_per_block

        def gather(index: int, payloads: Sequence[torch.Tensor]) -> None:
            firsts = range((start + index) * per_block, len(order.block_ids), per_block)
            self._paged.gather_blocks(
                [
                    (order.block_ids[first : first + per_block], payload)
                    for first, payload in zip(firsts, payloads, strict=False)
                ]
            )

        # Without an agent there is nobody to offer it to, and a null block has no bytes.
        if self._session.welcome is None or _NULL_BLOCK in order.block_ids:
            result.dropped_blocks += num_left
            return
        run = KeptRun(
            owner=order.owner,
            namespace=order.namespace,
            tenant=order.tenant,
            parent=order.block_hashes[start - 1] if start else order.parent,
            block_hashes=list(order.block_hashes[start:]),
            kept_at=time.monotonic(),
            asked=asked,
        )
        kept = self.backlog.keep(run, gather, self._queue[1])
        result.refused_blocks += kept
        result.dropped_blocks += num_left - kept
        if kept:
            self.publisher.start_retrying()

    def _write(
        self, order: StoreOrder, refs: Sequence[SlotRef | None], result: StoreResult
    ) -> None:
        slots = self._slots()
        if slots is None:
            return
        per_block = self._settings.pages_per_block
        written: dict[SlotRef, bytes] = {}
        blocks: list[Outgoing] = []
        lost: list[SlotRef] = []
        for index, ref in enumerate(refs):
            if ref is None:
                continue
            block_ids = order.block_ids[index * per_block : (index + 1) * per_block]
            if _NULL_BLOCK in block_ids or not slots.holds(ref.slot):
                lost.append(ref)
                continue
            blocks.append((block_ids, slots.begin_write(ref.slot)))
            written[ref] = order.block_hashes[index]
        self._paged.gather_blocks(blocks)
        sealed = Written(order.owner, tuple(written), lambda ref: slots.seal(ref, written[ref]))
        if written and not self.publisher.put(sealed):
            lost += written
            written = {}
        result.stored_blocks += len(written)
        result.stored_bytes += len(written) * self._paged.block_bytes
        result.dropped_blocks += len(lost)
        if lost:
            self._session.post(CompleteStore(order.owner, [], lost))

    def _on_late(self, body: RequestBody, reply: ReplyBody) -> None:
        """The step has gone on; the backlog has the bytes that these slots are for."""
        assert isinstance(body, PrepareStore)
        if not isinstance(reply, PreparedStore):
            return
        self._queue = reply.write_queue
        if self.backlog.grant(body.owner, body.block_hashes[0], reply):
            self.publisher.start_retrying()
            return
        refs = [ref for ref in reply.slots if ref is not None]
        self._session.post(CompleteStore(body.owner, [], refs))

    def _watch_queue(self) -> None:
        """Say once when it gets tight, and once when it is over."""
        alarm = self.queue_share >= ALARM_SHARE
        if alarm and not self._alarm:
            self.alarms += 1
            logger.warning(
                "stores are held up: the pool's write queue has %d of %d blocks, the backlog %d",
                *self._queue,
                self.backlog.num_blocks,
            )
        self._alarm = alarm

    # --- the store thread ---------------------------------------------------------------------

    def _offer(self, run: KeptRun) -> int:
        """Give a kept run to the pool; how many blocks are done with."""
        answer, owner = run.granted, run.owner
        if answer is None:
            owner = self._retry_owner
            body = PrepareStore(
                owner, run.namespace, run.parent, list(run.block_hashes), run.tenant
            )
            timeout = self._settings.store_timeout_seconds
            answer = self._session.call(body, PreparedStore, timeout)
        slots = self._slots()
        if answer is None or slots is None:
            return 0
        self._queue = answer.write_queue
        # A late answer is about all that was asked for; of that, the head may be all that was kept.
        refs = answer.slots[: len(answer.slots) - answer.num_refused]
        kept = refs[: len(run.block_hashes)]
        written = {
            ref: key for ref, key in zip(kept, run.block_hashes, strict=False) if ref is not None
        }
        for ref, payload in zip(kept, run.payloads, strict=False):
            if ref is not None:
                slots.begin_write(ref.slot).copy_(payload)
        surplus = [ref for ref in refs[len(kept) :] if ref is not None]
        self.publisher.publish(
            Written(owner, tuple(written), lambda ref: slots.seal(ref, written[ref])), surplus
        )
        if not owner.startswith("transfer:"):
            self._session.post(Release(owner))
        return len(kept)

    def _complete(self, message: CompleteStore) -> bool:
        reply = self._session.call(message, Done, self._settings.store_timeout_seconds)
        return reply is not None
