"""Placement of a trace on emulated prefill workers, with the gateway's own cores and no clock.

A request is placed when it arrives, on what the gateway would know: its own queues, what nodes hold
(without delay), times that it has fitted. Workers compute one prompt after the other.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controlplane.core.expected import ExpectedBlocks
from controlplane.core.placement import Placing, Rules, place, shared_tokens
from controlplane.core.prediction import PrefillModel, share_priors
from controlplane.core.prefill_queue import PrefillQueue
from controlplane.core.routing import PrefillOption, Priced, Source, TransferCost
from workers.core.cost_model import CostModel

if TYPE_CHECKING:
    from random import Random

Chooser = Callable[[Rules, list[PrefillOption], Placing, Source | None], list[Priced]]


@dataclass(frozen=True, slots=True)
class SimRequest:
    """`blocks` is the chain of block numbers, head first, the last perhaps partial."""

    at: float  # seconds
    prompt_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SimCluster:
    """Alike workers, each on a node of its own. `knows_links`: transfers have a price and a path;
    `knows_queued`: blocks of prompts on their way count where these go."""

    num_workers: int
    node_blocks: int  # capacity of a node's pool
    block_tokens: int
    costs: CostModel
    knows_links: bool = True
    knows_queued: bool = True


@dataclass(slots=True)
class SimResult:
    """Of one run, in the order of arrival; seconds of work by worker."""

    ttft_seconds: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    busy_seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    request: SimRequest
    number: int
    priced: Priced
    source_tokens: int
    service_seconds: float = 0.0
    cached_tokens: int = 0
    moved_tokens: int = 0


@dataclass(slots=True)
class _Worker:
    name: str
    node_id: str
    capacity: int
    block_tokens: int
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    waiting: list[_Job] = field(default_factory=list)
    busy: bool = False
    times: PrefillModel = field(default_factory=PrefillModel)
    queue: PrefillQueue = field(default_factory=PrefillQueue)

    def prefix_tokens(self, request: SimRequest) -> int:
        blocks = 0
        for block in request.blocks:
            if block not in self.held:
                break
            blocks += 1
        return max(0, min(blocks * self.block_tokens, request.prompt_tokens - 1))

    def store(self, request: SimRequest) -> None:
        """Tails leave before heads: the head is touched last."""
        full = request.prompt_tokens // self.block_tokens
        for block in reversed(request.blocks[:full]):
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > self.capacity:
            self.held.popitem(last=False)


class PlacementSim:
    """One use: `run`."""

    def __init__(
        self, cluster: SimCluster, rules: Rules, rng: Random, choose: Chooser = place
    ) -> None:
        self._cluster, self._rules, self._rng, self._choose = cluster, rules, rng, choose
        self._workers = [
            _Worker(f"p{i:02}", f"n{i:02}", cluster.node_blocks, cluster.block_tokens)
            for i in range(cluster.num_workers)
        ]
        self._by_name = {worker.name: worker for worker in self._workers}
        self._expected = ExpectedBlocks()
        self._ends: list[tuple[float, int, str, _Job]] = []
        costs = cluster.costs
        per_token = costs.transfer(1_000_000) / 1e6
        link = TransferCost(per_token, costs.transfer(1) - per_token)
        self._paths = {
            one.node_id: {o.node_id: link for o in self._workers if o is not one}
            for one in self._workers
        }
        self.result = SimResult(busy_seconds=[0.0] * cluster.num_workers)

    def run(self, requests: Sequence[SimRequest]) -> SimResult:
        """All of `requests`, which are in order of time, to the last first token."""
        self.result.ttft_seconds = [0.0] * len(requests)
        for number, request in enumerate(requests):
            self._until(request.at)
            self._arrive(number, request)
        self._until(float("inf"))
        return self.result

    def _until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            at, _, name, job = heapq.heappop(self._ends)
            self._ended(self._by_name[name], job, at)

    def _arrive(self, number: int, request: SimRequest) -> None:
        now = request.at
        held = {worker.node_id: worker.prefix_tokens(request) for worker in self._workers}
        keys = [block.to_bytes(8, "little") for block in request.blocks]
        expected = self._expected.lengths(keys) if self._cluster.knows_queued else {}
        options = [
            PrefillOption(
                worker.name, worker.node_id,
                self._usable(request, held[worker.node_id], expected.get(worker.node_id, 0)),
                worker.queue.wait_seconds(now), len(worker.queue), worker.times,
            )
            for worker in self._workers
        ]  # fmt: skip
        node_id = max(held, key=held.__getitem__)
        source = None
        if held[node_id] and self._cluster.knows_links:
            source = Source(node_id, held[node_id], self._paths[node_id])
        placing = Placing(
            request.prompt_tokens, number, self._rng.random(),
            shared_tokens(held.values(), len(self._workers)),
        )  # fmt: skip
        first = self._choose(self._rules, options, placing, source)[0]
        worker = self._by_name[first.option.worker_id]
        moved = first.used_prefix_tokens if first.transfer_seconds else 0
        work = first.prefill_seconds + first.transfer_seconds
        worker.queue.start(str(number), work, request.prompt_tokens, now)
        full = request.prompt_tokens // self._cluster.block_tokens
        self._expected.start(str(number), worker.node_id, keys[:full])
        worker.waiting.append(_Job(request, number, first, moved))
        if not worker.busy:
            self._begin(worker, now)

    def _usable(self, request: SimRequest, held: int, expected_blocks: int) -> int:
        expected = expected_blocks * self._cluster.block_tokens
        return max(held, min(expected, request.prompt_tokens - 1))

    def _begin(self, worker: _Worker, now: float) -> None:
        job, costs = worker.waiting.pop(0), self._cluster.costs
        own = worker.prefix_tokens(job.request)
        job.moved_tokens = max(0, job.source_tokens - own)
        job.cached_tokens = own + job.moved_tokens
        prefill = costs.prefill(job.request.prompt_tokens, job.cached_tokens)
        job.service_seconds = prefill + costs.transfer(job.moved_tokens)
        worker.busy = True
        end = now + job.service_seconds
        heapq.heappush(self._ends, (end, job.number, worker.name, job))

    def _ended(self, worker: _Worker, job: _Job, now: float) -> None:
        request, result = job.request, self.result
        seconds = worker.queue.end(str(job.number), now)
        worker.store(request)
        self._expected.end(str(job.number))
        if not job.moved_tokens:
            worker.times.observe(
                request.prompt_tokens - job.cached_tokens, job.cached_tokens, seconds
            )
            share_priors([one.times for one in self._workers])
        result.ttft_seconds[job.number] = now - request.at
        result.hit_tokens += job.cached_tokens
        result.prompt_tokens += request.prompt_tokens
        result.busy_seconds[self._workers.index(worker)] += job.service_seconds
        worker.busy = False
        if worker.waiting:
            self._begin(worker, now)
