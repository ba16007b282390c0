"""Decisions about transfers: what to post, what to retry, what to give up. See `handle`.

A transfer ends in bounded time: by its pieces, by its deadline, or by its link's breaker. It ends
only when no op of it is in flight, so that after its `Finish` nothing writes into its slots.
Memory is bounded by the limits and by the requests: no op exists before it is posted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from workers.core.transfer_job import DONE, Gather, Job, Part, check_request
from workers.core.transfer_link import Link, LinkState
from workers.core.transfer_pacing import Breaker, BreakerState, RetryBudget, backoff_seconds
from workers.core.transfer_types import (
    RETRYABLE,
    SMALL_PIECE_BYTES,
    Alarm,
    Arrived,
    CancelOps,
    CancelRequested,
    CapRule,
    CapSet,
    Cause,
    Close,
    Command,
    Completed,
    Completion,
    Direction,
    Down,
    Event,
    Finish,
    LimitsSet,
    LinkId,
    Op,
    Open,
    Opened,
    Post,
    Posted,
    Priority,
    Progressed,
    Seal,
    Sealed,
    Submitted,
    Ticked,
    TransferLimits,
)

LinkEvent = Completed | Posted | Opened | Down | Progressed | CapSet


class Transfers:
    """All transfers that a node has under way. `jitter` gives numbers in [0, 1)."""

    def __init__(self, limits: TransferLimits, jitter: Callable[[], float]) -> None:
        self.limits = limits
        self.cap = CapRule()
        self.links: dict[LinkId, Link] = {}
        self.jobs: dict[str, Job] = {}
        self._jitter = jitter
        self._ending: dict[str, Job] = {}  # given up, with ops still in flight
        self._next_op = 1
        self._deadlines: list[tuple[float, str]] = []
        self._out: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        """What to do about it, in order. `now` is monotonic seconds."""
        match event:
            case Submitted() | CancelRequested() | Sealed():
                self._about_transfer(event, now)
            case Ticked():
                self._tick(now)
            case LimitsSet():
                self._set_limits(event, now)
            case _:
                link = self.links.get(event.link)
                if link is not None:
                    self._about_link(link, event, now)
        return self._drain()

    def next_wake(self, now: float) -> float | None:
        """When `Ticked` is due if nothing else happens."""
        times = [at for link in self.links.values() if (at := link.wake_at(now)) is not None]
        times += [job.cancel_by for job in self._ending.values()]
        if self._deadlines:
            times.append(self._deadlines[0][0])
        return min(times, default=None)

    def _drain(self) -> list[Command]:
        out, self._out = self._out, []
        return out

    def _about_transfer(self, event: Submitted | CancelRequested | Sealed, now: float) -> None:
        match event:
            case Submitted():
                self._submit(event, now)
            case Sealed():
                self._sealed(event, now)
            case CancelRequested(transfer_id, cause):
                job = self.jobs.get(transfer_id)
                if job is not None:
                    self._end(job, cause, now)

    def _about_link(self, link: Link, event: LinkEvent, now: float) -> None:
        match event:
            case Completed(_, completions):
                self._complete(link, completions, now)
            case Posted():
                self._posted(link, event, now)
            case Opened():
                self._opened(link, event, now)
            case Down():
                self._down(link, event, now)
            case Progressed():
                link.progress_at = now
            case CapSet(_, rate):
                link.own_cap = rate
                link.apply_cap(self.cap, now)

    def _set_limits(self, event: LimitsSet, now: float) -> None:
        self.limits, self.cap = event.limits, event.cap
        for link in self.links.values():
            link.set_limits(event.limits)
            link.apply_cap(self.cap, now)
            self._pump(link, now)

    # --- requests ---------------------------------------------------------------------------

    def _submit(self, event: Submitted, now: float) -> None:
        request = event.request
        check_request(request)
        if request.transfer_id in self.jobs:
            raise ValueError(f"transfer {request.transfer_id}: there is one of that name")
        job = Job(request, LinkId(request.peer, event.transport), now)
        link = self._link(job.link, now)
        if link is not None and request.incarnation > link.expected:
            self._renew(link, request.incarnation, now)
        refusal = self._refusal(link, job, now)
        if link is None or refusal is not None:
            job.give_up_rest(refusal or Cause.NO_ROOM)
            self._out.append(Finish(job.result(now, link.last_error if link else "")))
            return
        self.jobs[request.transfer_id] = link.jobs[request.transfer_id] = job
        heapq.heappush(self._deadlines, (request.deadline, request.transfer_id))
        if link.state is LinkState.UP:
            job.opened_at = now
        link.enqueue(job)
        self._pump(link, now)

    def _refusal(self, link: Link | None, job: Job, now: float) -> Cause | None:
        if link is None or len(self.jobs) >= self.limits.max_transfers:
            return Cause.NO_ROOM
        if job.request.deadline <= now:
            return Cause.DEADLINE
        if not link.breaker.allows(now):
            return Cause.PEER_DOWN
        named = job.request.incarnation
        if named and named < max(link.expected, link.incarnation):
            return Cause.INCARNATION
        return None

    def _link(self, link_id: LinkId, now: float) -> Link | None:
        """The link, made if need be. None: there are too many, and all are in use."""
        link = self.links.get(link_id)
        if link is not None:
            return link
        if len(self.links) >= self.limits.max_links and not self._drop_idle_link():
            return None
        limits = self.limits
        link = Link(
            link_id, limits, RetryBudget(limits.retry_floor_bytes, limits.retry_share),
            Breaker(limits.breaker_failures, limits.backoff_seconds, limits.max_backoff_seconds),
            used_at=now,
        )  # fmt: skip
        link.apply_cap(self.cap, now)
        self.links[link_id] = link
        return link

    def _drop_idle_link(self) -> bool:
        idle = [link for link in self.links.values() if not link.jobs]
        if not idle:
            return False
        oldest = min(idle, key=lambda link: link.used_at)
        if oldest.state is not LinkState.IDLE:
            self._out.append(Close(oldest.id))
        if oldest.breaker.succeeded():
            self._out.append(Alarm(oldest.id, raised=False, text="the peer is not used any more"))
        del self.links[oldest.id]
        return True

    def _renew(self, link: Link, incarnation: int, now: float) -> None:
        """A newer process stands where the link's peer stood: what was asked of the old is void."""
        link.expected = incarnation
        if link.breaker.succeeded():
            self._out.append(Alarm(link.id, raised=False, text="the peer has started anew"))
        if link.state is LinkState.IDLE or link.incarnation == incarnation:
            return
        self._out.append(Close(link.id))
        self._lose(link, Cause.INCARNATION, now)
        for job in list(link.jobs.values()):
            if job.request.incarnation not in (0, incarnation):
                self._end(job, Cause.INCARNATION, now)

    # --- the link ---------------------------------------------------------------------------

    def _opened(self, link: Link, event: Opened, now: float) -> None:
        if link.state is not LinkState.OPENING:
            return
        link.state, link.depth = LinkState.UP, max(1, event.depth)
        link.incarnation = event.incarnation
        link.progress_at = link.used_at = now
        link.post_refusals, link.post_again_at = 0, 0.0
        for job in list(link.jobs.values()):
            if job.request.incarnation not in (0, event.incarnation):
                self._end(job, Cause.INCARNATION, now)
            elif job.opened_at is None:
                job.opened_at = now
        self._pump(link, now)

    def _down(self, link: Link, event: Down, now: float) -> None:
        """The endpoint is gone: retry what flew, count it against the peer."""
        if link.state is LinkState.IDLE:
            return
        link.last_error, link.failed_at = event.text or str(event.cause), now
        self._lose(link, event.cause, now)
        fallen: Cause | None = None
        if event.cause is Cause.INCARNATION:
            link.expected, fallen = event.incarnation, Cause.INCARNATION
        else:
            if link.breaker.failed(now, self._jitter()):
                self._out.append(Alarm(link.id, raised=True, text=link.last_error))
            if event.cause is Cause.REFUSED:
                fallen = Cause.REFUSED
            elif link.breaker.state is BreakerState.OPEN:
                fallen = Cause.PEER_DOWN
        if fallen is not None:
            for job in list(link.jobs.values()):
                self._end(job, fallen, now)

    def _lose(self, link: Link, cause: Cause, now: float) -> None:
        link.state, link.incarnation, link.depth = LinkState.IDLE, 0, 0
        for op_id in list(link.flights):
            self._op_failed(link, op_id, cause, now)
        for job in list(link.jobs.values()):
            self._settle(job, link, now)

    def _pump(self, link: Link, now: float) -> None:
        """Post what may be posted; connect if there is something to post."""
        link.release_due(now)
        if not link.has_work:
            return
        if link.state is LinkState.IDLE:
            self._open(link, now)
        if link.state is not LinkState.UP or now < link.post_again_at:
            return
        limits = self.limits
        if link.flying_bytes > limits.window_bytes - limits.refill_bytes > 0:
            return  # post in batches: what a slot or two of room is worth is less than a post
        ops: list[Op] = []
        for priority in Priority:
            self._fill(link, priority, ops, now)
        if ops:
            if not link.flights or len(link.flights) == len(ops):
                link.progress_at = now
            link.used_at = now
            self._out.append(Post(link.id, ops))

    def _open(self, link: Link, now: float) -> None:
        if now < link.breaker.retry_at or not link.breaker.allows(now):
            return
        link.state, link.opening_since = LinkState.OPENING, now
        link.opens += 1
        self._out.append(Open(link.id, link.expected))

    def _fill(self, link: Link, priority: Priority, ops: list[Op], now: float) -> None:
        queue = link.ready[priority]
        while queue and link.bucket.ready(now):
            job = queue[0]
            part = job.take()
            if part is None:
                queue.popleft()
                job.queued = False
                continue
            if not link.room(priority, part.length):
                job.requeue.appendleft(part)
                return
            ops.append(self._launch(link, job, part, now))

    def _launch(self, link: Link, job: Job, part: Part, now: float) -> Op:
        op_id = self._next_op
        self._next_op = op_id + 1
        link.fly(op_id, job, part, now)
        link.bucket.take(part.length)
        if part.length < SMALL_PIECE_BYTES:
            link.small_ops += 1
        if job.first_post_at is None:
            job.first_post_at = now
        request = job.request
        piece = request.pieces[part.piece]
        return Op(op_id, request.direction, piece, part.offset, part.length)

    def _posted(self, link: Link, event: Posted, now: float) -> None:
        """The device may take less than it was given: the rest is posted later, from there on."""
        if event.num_accepted >= len(event.op_ids):
            link.post_refusals = 0
            return
        returned: dict[str, tuple[Job, list[Part]]] = {}
        for op_id in event.op_ids[event.num_accepted :]:
            flight = link.unfly(op_id)
            if flight is not None:
                entry = returned.setdefault(flight.job.request.transfer_id, (flight.job, []))
                entry[1].append(flight.part)
        for job, parts in reversed(list(returned.values())):
            job.give_back(parts)
            link.enqueue_first(job)
        self._hold_back(link, event.num_accepted, now)
        for job, _ in returned.values():
            self._settle(job, link, now)

    def _hold_back(self, link: Link, num_accepted: int, now: float) -> None:
        """Completions are drained before the next post."""
        link.post_refusals = 0 if num_accepted else link.post_refusals + 1
        if link.post_refusals > self.limits.max_post_refusals and not link.flights:
            self._out.append(Close(link.id))
            text = "the device takes no more work requests"
            self._down(link, Down(link.id, Cause.CONNECTION, text), now)
            return
        limits = self.limits
        pause = backoff_seconds(
            max(1, link.post_refusals), limits.backoff_seconds, limits.max_op_backoff_seconds,
            self._jitter(),
        )  # fmt: skip
        link.post_again_at = now + pause

    # --- ops --------------------------------------------------------------------------------

    def _complete(self, link: Link, completions: list[Completion], now: float) -> None:
        link.progress_at = link.used_at = now
        link.post_again_at = 0.0
        jobs: dict[str, Job] = {}
        for completion in completions:
            cause = completion.cause
            if cause is not None:
                job = self._op_failed(link, completion.op_id, cause, now)
            else:
                job = self._op_arrived(link, completion.op_id, completion.checksum, now)
            if job is not None:
                job.verify_seconds += completion.verify_seconds
                if completion.moving_seconds:
                    job.moving_since(now - completion.moving_seconds)
                jobs[job.request.transfer_id] = job
        for job in jobs.values():
            self._settle(job, link, now)
        self._pump(link, now)

    def _op_arrived(self, link: Link, op_id: int, checksum: int, now: float) -> Job | None:
        flight = link.land(op_id)
        if flight is None:
            return None
        if link.breaker.succeeded():
            self._out.append(Alarm(link.id, raised=False, text="transfers work again"))
        job, part = flight.job, flight.part
        link.budget.arrived(part.length)
        if link.moved(part.length, now):
            link.apply_cap(self.cap, now)
        piece = job.request.pieces[part.piece]
        gather = job.arrived(part)
        if part.length == piece.block_length:
            if job.request.direction is Direction.PULL and job.status[part.piece] == DONE:
                self._out.append(Seal(job.request.transfer_id, piece, checksum, verified=True))
            return job
        if not piece.whole and job.piece_left.get(part.piece) == 0:
            self._out.append(Arrived(job.request.transfer_id, [part.piece]))
        if gather is not None:
            self._gathered(job, gather, piece_index=part.piece, checksum=checksum)
        return job

    def _gathered(self, job: Job, gather: Gather, piece_index: int, checksum: int) -> None:
        if not gather.covers:
            job.finish_gather(gather)
            return
        gather.sealing, gather.checksum = True, checksum
        job.sealing += 1
        piece = job.request.pieces[piece_index]
        self._out.append(Seal(job.request.transfer_id, piece, checksum, verified=False))

    def _sealed(self, event: Sealed, now: float) -> None:
        job = self.jobs.get(event.transfer_id)
        gather = job.gathers.get(event.local_slot) if job is not None else None
        if job is None or gather is None or not gather.sealing:
            return
        link = self.links[job.link]
        job.sealing -= 1
        gather.sealing = False
        job.verify_seconds += event.verify_seconds
        if event.ok:
            job.finish_gather(gather)
        elif self._may_retry(link, job, gather.attempts, gather.wanted, now):
            job.restart_gather(gather)
            link.enqueue(job)
        else:
            job.give_up(gather.indices[0], job.ending or Cause.CORRUPT)
        self._settle(job, link, now)
        self._pump(link, now)

    def _op_failed(self, link: Link, op_id: int, cause: Cause, now: float) -> Job | None:
        flight = link.land(op_id)
        if flight is None:
            return None
        job, part = flight.job, flight.part
        if cause in RETRYABLE and self._may_retry(link, job, part.attempts, part.length, now):
            limits = self.limits
            pause = backoff_seconds(
                part.attempts + 1, limits.backoff_seconds, limits.max_op_backoff_seconds,
                self._jitter(),
            )  # fmt: skip
            link.delay(now + pause, job, part._replace(attempts=part.attempts + 1))
        else:
            job.give_up(part.piece, job.ending or cause)
        return job

    def _may_retry(self, link: Link, job: Job, attempts: int, length: int, now: float) -> bool:
        if job.ending is not None or attempts + 1 >= self.limits.max_attempts:
            return False
        if not link.budget.spend(length, now):
            return False
        job.num_retries += 1
        return True

    # --- ends -------------------------------------------------------------------------------

    def _end(self, job: Job, cause: Cause, now: float) -> None:
        """Give up what is not in flight, ask for what is, and finish when it is back."""
        if job.ending is not None:
            return
        link = self.links[job.link]
        job.give_up_rest(cause)
        job.cancel_by = now + self.limits.cancel_seconds
        if job.in_flight:
            self._ending[job.request.transfer_id] = job
            self._out.append(CancelOps(link.id, list(job.in_flight)))
        self._settle(job, link, now)

    def _settle(self, job: Job, link: Link, now: float) -> None:
        if job.done and self.jobs.pop(job.request.transfer_id, None) is not None:
            self._ending.pop(job.request.transfer_id, None)
            link.forget(job)
            self._out.append(Finish(job.result(now, link.error_since(job.submitted_at))))

    def _tick(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, transfer_id = heapq.heappop(self._deadlines)
            job = self.jobs.get(transfer_id)
            if job is not None and job.request.deadline <= now:
                self._end(job, Cause.DEADLINE, now)
        late = {job.link for job in self._ending.values() if job.cancel_by <= now}
        for link in list(self.links.values()):
            self._tick_link(link, now, late=link.id in late)
        if len(self._deadlines) > 2 * len(self.jobs) + 64:
            kept = [(job.request.deadline, name) for name, job in self.jobs.items()]
            heapq.heapify(kept)
            self._deadlines = kept

    def _tick_link(self, link: Link, now: float, *, late: bool) -> None:
        limits = self.limits
        if link.state is LinkState.OPENING and now >= link.opening_since + limits.connect_seconds:
            self._cut(link, f"no connection within {limits.connect_seconds:g} s", now)
        elif link.flights and now >= link.progress_at + limits.stall_seconds:
            self._cut(link, f"nothing moved for {limits.stall_seconds:g} s", now)
        elif late:
            self._cut(link, "cancelled transfers were not given back in time", now)
        elif (
            link.state is LinkState.UP
            and not link.jobs
            and now >= link.used_at + limits.idle_seconds
        ):
            self._out.append(Close(link.id))
            link.state, link.incarnation, link.depth = LinkState.IDLE, 0, 0
        self._pump(link, now)

    def _cut(self, link: Link, text: str, now: float) -> None:
        """The peer is too slow: end the endpoint, so that nothing of it writes any more."""
        self._out.append(Close(link.id))
        self._down(link, Down(link.id, Cause.TIMEOUT, text), now)
