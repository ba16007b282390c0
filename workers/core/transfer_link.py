"""One path to one peer: its window, its queues, its retries, its health. Held by the engine."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from workers.core.transfer_job import Job, Part
from workers.core.transfer_pacing import Breaker, RetryBudget, TokenBucket
from workers.core.transfer_types import CapRule, LinkId, Priority, TransferLimits

MEASURE_BYTES: Final = 1 << 20
"""Fewer tell of latency, not of bandwidth."""


class LinkState(StrEnum):
    """idle -> opening -> up -> idle; what failed waits in idle until the breaker's time."""

    IDLE = "idle"
    OPENING = "opening"
    UP = "up"


@dataclass(slots=True, eq=False)
class Flight:
    """An op in flight."""

    job: Job
    part: Part


@dataclass(slots=True, eq=False)
class Link:
    id: LinkId
    limits: TransferLimits
    budget: RetryBudget
    breaker: Breaker
    bucket: TokenBucket = field(default_factory=TokenBucket)
    state: LinkState = LinkState.IDLE
    expected: int = 0  # the newest incarnation that a request named
    incarnation: int = 0  # of the peer behind the endpoint
    depth: int = 0  # ops that may be in flight, after the device's say
    jobs: dict[str, Job] = field(default_factory=dict)
    ready: dict[Priority, deque[Job]] = field(
        default_factory=lambda: {priority: deque() for priority in Priority}
    )
    flights: dict[int, Flight] = field(default_factory=dict)
    flying_bytes: int = 0
    flying_batch_bytes: int = 0
    delayed: list[tuple[float, int, Job, Part]] = field(default_factory=list)
    opening_since: float = 0.0
    progress_at: float = 0.0
    used_at: float = 0.0
    post_again_at: float = 0.0  # after the device took less than it was given
    post_refusals: int = 0
    last_error: str = ""
    failed_at: float = 0.0  # when that was
    opens: int = 0
    small_ops: int = 0
    late: int = 0  # completions of ops that had been given up
    widest_ops: int = 0  # the window when what flies was posted, where that was larger
    widest_bytes: int = 0
    own_cap: float | None = None  # set for this link alone
    best_rate: float = 0.0  # bytes a second, while busy: what the link has shown that it can
    _busy_since: float = 0.0
    _busy_bytes: int = 0
    _order: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.delayed) or any(self.ready.values())

    def error_since(self, at: float) -> str:
        """What the link suffers from, or has suffered from since then; "" where that is over."""
        over = self.state is LinkState.UP and self.failed_at < at
        return "" if over else self.last_error

    @property
    def window_ops(self) -> int:
        """The effective queue depth."""
        return min(self.limits.window_ops, self.depth) if self.depth else self.limits.window_ops

    def enqueue(self, job: Job) -> None:
        if not job.queued and job.has_parts:
            job.queued = True
            self.ready[job.request.priority].append(job)

    def enqueue_first(self, job: Job) -> None:
        """Before the others of its class: its ops were already taken once."""
        if job.queued:
            self.ready[job.request.priority].remove(job)
        job.queued = job.has_parts
        if job.queued:
            self.ready[job.request.priority].appendleft(job)

    def delay(self, due: float, job: Job, part: Part) -> None:
        self._order += 1
        job.delayed += 1
        heapq.heappush(self.delayed, (due, self._order, job, part))

    def release_due(self, now: float) -> None:
        """Retries whose time has come join their job's queue again."""
        while self.delayed and self.delayed[0][0] <= now:
            _, _, job, part = heapq.heappop(self.delayed)
            job.delayed -= 1
            if job.ending is None:
                job.requeue.append(part)
                self.enqueue(job)

    def room(self, priority: Priority, length: int) -> bool:
        """May an op of that size be posted? One always may, however large."""
        if len(self.flights) >= self.window_ops:
            return False
        if priority is Priority.BATCH:
            share = self.limits.window_bytes * self.limits.batch_share
            if self.flying_batch_bytes and self.flying_batch_bytes + length > share:
                return False
        return not self.flights or self.flying_bytes + length <= self.limits.window_bytes

    def fly(self, op_id: int, job: Job, part: Part, now: float) -> None:
        if not self.flights:
            self._busy_since, self._busy_bytes = now, 0
        self.flights[op_id] = Flight(job, part)
        job.in_flight[op_id] = part
        self.flying_bytes += part.length
        if job.request.priority is Priority.BATCH:
            self.flying_batch_bytes += part.length

    def land(self, op_id: int) -> Flight | None:
        flight = self.flights.pop(op_id, None)
        if flight is None:
            self.late += 1
            return None
        del flight.job.in_flight[op_id]
        self.flying_bytes -= flight.part.length
        if flight.job.request.priority is Priority.BATCH:
            self.flying_batch_bytes -= flight.part.length
        return flight

    def set_limits(self, limits: TransferLimits) -> None:
        """Other bounds from now on; what flies stays under way."""
        self.widest_ops = max(self.widest_ops, self.window_ops) if self.flights else 0
        widest = max(self.widest_bytes, self.limits.window_bytes)
        self.widest_bytes = widest if self.flights else 0
        self.limits = limits
        self.budget.floor_bytes, self.budget.share = limits.retry_floor_bytes, limits.retry_share
        self.breaker.threshold = limits.breaker_failures

    def moved(self, num_bytes: int, now: float) -> bool:
        """Book bytes that arrived; whether the link was quicker than ever. A cap makes pauses, in
        which nothing flies: they do not count."""
        self._busy_bytes += num_bytes
        seconds = now - self._busy_since
        if self._busy_bytes < MEASURE_BYTES or seconds <= 0:
            return False
        rate = self._busy_bytes / seconds
        if rate <= self.best_rate:
            return False
        self.best_rate = rate
        return True

    def apply_cap(self, rule: CapRule, now: float) -> None:
        """What is set for this link alone, else the rule. A rate that hardly differs stays."""
        rate = self.own_cap
        if rate is None:
            rate = rule.of(self.id.transport, self.best_rate)
        if not rate or abs(rate - self.bucket.rate) > 0.02 * rate:
            self.bucket.set_rate(rate, now)

    def unfly(self, op_id: int) -> Flight | None:
        """It was not posted after all."""
        flight = self.land(op_id)
        if flight is not None:
            self.bucket.take(-flight.part.length)
        return flight

    def forget(self, job: Job) -> None:
        """The job ended."""
        self.jobs.pop(job.request.transfer_id, None)
        if job.queued:
            self.ready[job.request.priority].remove(job)
            job.queued = False
        if job.delayed:
            self.delayed = [entry for entry in self.delayed if entry[2] is not job]
            heapq.heapify(self.delayed)
            job.delayed = 0

    def wake_at(self, now: float) -> float | None:
        """When time alone makes a difference to this link."""
        times: list[float] = []
        if self.state is LinkState.OPENING:
            times.append(self.opening_since + self.limits.connect_seconds)
        elif self.state is LinkState.IDLE and self.has_work:
            times.append(self.breaker.retry_at)
        elif self.state is LinkState.UP:
            if self.flights:
                times.append(self.progress_at + self.limits.stall_seconds)
            elif any(self.ready.values()):
                times.append(max(self.post_again_at, self.bucket.ready_at(now)))
            elif not self.jobs:
                times.append(self.used_at + self.limits.idle_seconds)
            if any(self.ready.values()) and not self.bucket.ready(now):
                times.append(max(self.post_again_at, self.bucket.ready_at(now)))
        if self.delayed:
            times.append(self.delayed[0][0])
        return min(times, default=None)
