"""Turns at the prefill workers: who may send leg 1 now. The rules are in core/dispatch_queue.

Where a worker has room and nobody waits, a turn costs two dictionary entries and no await.
"""

import asyncio
from collections.abc import Iterable, Mapping
from enum import Enum

from controlplane.core.dispatch_queue import Beside, DispatchQueue, Offer, QueueRules
from controlplane.core.fairness import QueuedLeg


class Turn(Enum):
    """How a wait ended."""

    GRANTED = "granted"
    GONE = "gone"  # the worker left or drains
    SHED = "shed"  # for a higher class, the queue was full
    TIMED_OUT = "timed_out"


class Dispatch:
    """One queue a worker. `enter` once a leg, `leave` when it has run or waits no more."""

    def __init__(self) -> None:
        self._queues: dict[str, DispatchQueue] = {}
        self._where: dict[str, DispatchQueue] = {}  # request -> its queue
        self._waiters: dict[str, asyncio.Future[Turn]] = {}
        self._waited_for: set[str] = set()  # workers for which legs wait at other gateways

    def apply(self, rules: Mapping[str, QueueRules]) -> None:
        """Workers that take new legs, with their rules. Who waits for another goes elsewhere."""
        for worker_id in self._queues.keys() - rules.keys():
            self._waited_for.discard(worker_id)
            self._end((leg.request_id for leg in self._queues.pop(worker_id).flush()), Turn.GONE)
        for worker_id, rule in rules.items():
            self._grant(self._queue(worker_id).set_rules(rule))

    def enter(self, worker_id: str, leg: QueuedLeg) -> Offer:
        """GO: the leg holds a turn. WAIT: `wait` for it. FULL: nothing is held."""
        queue = self._queue(worker_id)
        offered = queue.offer(leg)
        if offered.offer is Offer.FULL:
            return Offer.FULL
        self._where[leg.request_id] = queue
        if offered.offer is Offer.WAIT:
            self._waiters[leg.request_id] = asyncio.get_running_loop().create_future()
        if offered.shed is not None:
            self._end((offered.shed.request_id,), Turn.SHED)
        if offered.granted:
            self._grant(offered.granted)
        return offered.offer

    def start(self, worker_id: str, leg: QueuedLeg) -> None:
        """Hold a turn at once, over those who wait."""
        queue = self._where[leg.request_id] = self._queue(worker_id)
        queue.start(leg)

    def enter_if_free(self, worker_id: str, leg: QueuedLeg) -> bool:
        """Take a turn that is there at once; else nothing is held."""
        return self.is_free(worker_id, leg) and self.enter(worker_id, leg) is Offer.GO

    def is_free(self, worker_id: str, leg: QueuedLeg) -> bool:
        queue = self._queues.get(worker_id)
        return queue is not None and queue.is_free(leg)

    async def wait(self, request_id: str, seconds: float) -> Turn:
        """After WAIT. Nothing is held any more unless the turn is granted."""
        waiter = self._waiters[request_id]
        try:
            async with asyncio.timeout(seconds):
                return await waiter
        except TimeoutError:
            self.leave(request_id)
            return Turn.TIMED_OUT
        except asyncio.CancelledError:
            self.leave(request_id)
            raise
        finally:
            self._waiters.pop(request_id, None)

    def leave(self, request_id: str) -> None:
        """Gives the turn back, or the place in the queue. Idempotent."""
        queue = self._where.pop(request_id, None)
        if queue is not None:
            granted = queue.leave(request_id)
            if granted:
                self._grant(granted)

    def holds(self, request_id: str, worker_id: str) -> bool:
        """Whether the request has its turn at this worker."""
        queue = self._where.get(request_id)
        return queue is not None and queue is self._queues.get(worker_id)

    def ahead_seconds(self, worker_id: str, leg: QueuedLeg) -> float:
        """Predicted seconds of the legs that would go before this one."""
        queue = self._queues.get(worker_id)
        if queue is None:
            return 0.0
        return queue.ahead_seconds(leg.rank, leg.hit, leg.tenant, leg.seconds)

    @property
    def anyone_waits(self) -> bool:
        """At any worker, here or at another gateway."""
        return bool(self._waiters or self._waited_for)

    def is_waited_for(self, worker_id: str) -> bool:
        """Here or at another gateway."""
        return worker_id in self._waited_for or self.waiting(worker_id) > 0

    def set_beside(self, worker_id: str, beside: Beside) -> None:
        """What other gateways have there now; who may go because of it goes."""
        queue = self._queues.get(worker_id)
        waited = queue is not None and any(beside.waiting)
        (self._waited_for.add if waited else self._waited_for.discard)(worker_id)
        if queue is not None:
            self._grant(queue.set_beside(beside))

    def queue(self, worker_id: str) -> DispatchQueue | None:
        """To look at."""
        return self._queues.get(worker_id)

    def waiting(self, worker_id: str) -> int:
        queue = self._queues.get(worker_id)
        return 0 if queue is None else queue.num_waiting

    @property
    def num_held(self) -> int:
        """Turns and places in queues, of all workers."""
        return len(self._where)

    def check_integrity(self) -> None:
        for queue in self._queues.values():
            queue.check_integrity()
        waiting = sum(queue.num_waiting for queue in self._queues.values())
        assert waiting == sum(not waiter.done() for waiter in self._waiters.values())

    def _queue(self, worker_id: str) -> DispatchQueue:
        queue = self._queues.get(worker_id)
        if queue is None:
            queue = self._queues[worker_id] = DispatchQueue()
        return queue

    def _grant(self, legs: Iterable[QueuedLeg]) -> None:
        for leg in legs:
            waiter = self._waiters.get(leg.request_id)
            if waiter is None or waiter.done():  # it ends in this very moment
                self.leave(leg.request_id)
            else:
                waiter.set_result(Turn.GRANTED)

    def _end(self, request_ids: Iterable[str], turn: Turn) -> None:
        for request_id in request_ids:
            self._where.pop(request_id, None)
            waiter = self._waiters.get(request_id)
            if waiter is not None and not waiter.done():
                waiter.set_result(turn)
