"""Placement of a trace on emulated prefill workers, with the gateway's own cores and no clock.

A request is placed when it arrives, on what the gateway would know: its own queues, what nodes hold
(without delay), times that it has fitted. Workers compute one prompt after the other.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, permutations
from typing import TYPE_CHECKING, Final, Literal, get_args

from controlplane.core.agreement import Agreement
from controlplane.core.expected import ExpectedBlocks
from controlplane.core.placement import Placing, Rules, place, shared_tokens
from controlplane.core.prediction import PrefillModel, share_priors
from controlplane.core.prefill_queue import PrefillQueue, QueueShare
from controlplane.core.routing import PrefillOption, Priced, Source, TransferCost
from workers.core.cost_model import CostModel

if TYPE_CHECKING:
    from random import Random

Told = Literal["queues", "samples", "blocks"]
TELL_AGAIN_SECONDS: Final = 0.5
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
    `knows_queued`: blocks of prompts on their way count where these go. Requests come to one of
    `gateways` at random; these learn of each other what is in `tells`, `tell_seconds` later.
    The last worker is there from `joins_at` on."""

    num_workers: int
    node_blocks: int  # capacity of a node's pool
    block_tokens: int
    costs: CostModel
    knows_links: bool = True
    knows_queued: bool = True
    gateways: int = 1
    tells: frozenset[Told] = frozenset(get_args(Told))
    tell_seconds: float = 0.01
    joins_at: float = 0.0


@dataclass(slots=True)
class SimResult:
    """Of one run, in the order of arrival; seconds of work by worker."""

    ttft_seconds: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    busy_seconds: list[float] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)  # worker of each
    agreement: Agreement = field(default_factory=Agreement)


@dataclass(slots=True)
class _Job:
    request: SimRequest
    number: int
    priced: Priced
    source_tokens: int
    gateway: _Gateway
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


@dataclass(slots=True)
class _Known:
    """What one gateway knows of one worker."""

    times: PrefillModel = field(default_factory=PrefillModel)
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    told_at: float = -1.0


@dataclass(slots=True)
class _Gateway:
    name: str
    known: dict[str, _Known]
    expected: ExpectedBlocks = field(default_factory=ExpectedBlocks)
    turn: int = 0


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
        self._gateways = [
            _Gateway(f"g{i}", {worker.name: _Known() for worker in self._workers})
            for i in range(cluster.gateways)
        ]
        self._later: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
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
        while self._later and self._later[0][0] <= now:
            at, _, event = heapq.heappop(self._later)
            event(at)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._later, (when, next(self._numbers), event))

    def _arrive(self, number: int, request: SimRequest) -> None:
        gateways = self._gateways
        gateway = gateways[0] if len(gateways) == 1 else self._rng.choice(gateways)
        held = {worker.node_id: worker.prefix_tokens(request) for worker in self._workers}
        chance = self._rng.random()
        if len(gateways) > 1:
            self._ask_all(request, held)
        first = self._placed(gateway, request, held, chance)[0]
        gateway.turn += 1
        self._send(gateway, number, request, first)

    def _placed(
        self, gateway: _Gateway, request: SimRequest, held: dict[str, int], chance: float
    ) -> list[Priced]:
        """As this gateway would have it now."""
        now, workers = request.at, self._workers
        if now < self._cluster.joins_at:
            workers = workers[:-1]
        expected = gateway.expected.lengths(_keys(request)) if self._cluster.knows_queued else {}
        options = [
            PrefillOption(
                worker.name, worker.node_id,
                self._usable(request, held[worker.node_id], expected.get(worker.node_id, 0)),
                known.queue.wait_seconds(now), known.queue.num_legs, known.times,
            )
            for worker in workers
            for known in (gateway.known[worker.name],)
        ]  # fmt: skip
        node_id = max(held, key=held.__getitem__)
        source = None
        if held[node_id] and self._cluster.knows_links:
            source = Source(node_id, held[node_id], self._paths[node_id])
        shared = shared_tokens(held.values(), len(workers))
        placing = Placing(request.prompt_tokens, gateway.turn, chance, shared)
        return self._choose(self._rules, options, placing, source)

    def _ask_all(self, request: SimRequest, held: dict[str, int]) -> None:
        """Every pair of gateways, of this request at this moment; nobody tries out."""
        plans = [
            [
                (one.option.worker_id, one.ttft_seconds)
                for one in self._placed(g, request, held, 1.0)
            ]
            for g in self._gateways
        ]
        for one, other in permutations(plans, 2):
            self.result.agreement.count(one, other[0][0])

    def _send(self, gateway: _Gateway, number: int, request: SimRequest, first: Priced) -> None:
        now, worker = request.at, self._by_name(first.option.worker_id)
        self.result.chosen.append(worker.name)
        moved = first.used_prefix_tokens if first.transfer_seconds else 0
        work = first.prefill_seconds + first.transfer_seconds
        gateway.known[worker.name].queue.start(str(number), work, request.prompt_tokens, now)
        keys = _keys(request)[: request.prompt_tokens // self._cluster.block_tokens]
        gateway.expected.start(str(number), worker.node_id, keys)
        if "blocks" in self._cluster.tells:
            for other in self._others(gateway):
                self._at(now + self._cluster.tell_seconds,
                         partial(_expect, other, str(number), worker.node_id, keys))  # fmt: skip
        self._tell(gateway, worker.name, now)
        worker.waiting.append(_Job(request, number, first, moved, gateway))
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
        self._at(now + job.service_seconds, partial(self._ended, worker, job))

    def _ended(self, worker: _Worker, job: _Job, now: float) -> None:
        request, result, gateway = job.request, self.result, job.gateway
        seconds = gateway.known[worker.name].queue.end(str(job.number), now)
        worker.store(request)
        gateway.expected.end(str(job.number))
        if "blocks" in self._cluster.tells:
            for other in self._others(gateway):
                self._at(now + self._cluster.tell_seconds,
                         partial(_arrived, other, str(job.number)))  # fmt: skip
        self._tell(gateway, worker.name, now)
        if not job.moved_tokens:
            sample = (request.prompt_tokens - job.cached_tokens, job.cached_tokens, seconds)
            self._teach(gateway, worker.name, sample, now)
        result.ttft_seconds[job.number] = now - request.at
        result.hit_tokens += job.cached_tokens
        result.prompt_tokens += request.prompt_tokens
        result.busy_seconds[self._workers.index(worker)] += job.service_seconds
        worker.busy = False
        if worker.waiting:
            self._begin(worker, now)

    # --- several gateways ---

    def _others(self, gateway: _Gateway) -> list[_Gateway]:
        return [other for other in self._gateways if other is not gateway]

    def _teach(
        self, gateway: _Gateway, worker: str, sample: tuple[int, int, float], now: float
    ) -> None:
        """Learn from a leg, and tell the others what it took."""
        known = gateway.known[worker]
        is_new = not known.times.num_samples
        if known.queue.is_vague or (is_new and known.queue.is_hearsay):
            return
        if known.queue.is_shared and known.times.refuses(*sample):
            return
        _learn(gateway, worker, sample, now)
        if "samples" in self._cluster.tells:
            for other in self._others(gateway):
                self._at(now + self._cluster.tell_seconds, partial(_learn, other, worker, sample))

    def _tell(self, gateway: _Gateway, changed: str, now: float) -> None:
        """What has changed, and what has not been told for long."""
        if "queues" not in self._cluster.tells or len(self._gateways) == 1:
            return
        for name, known in gateway.known.items():
            old = len(known.queue) and now - known.told_at > TELL_AGAIN_SECONDS
            if name == changed or old:
                known.told_at = now
                share = known.queue.share(now)
                self._at(now + self._cluster.tell_seconds,
                         partial(self._told, gateway, name, share))  # fmt: skip

    def _told(self, gateway: _Gateway, worker: str, share: QueueShare, now: float) -> None:
        for other in self._others(gateway):
            other.known[worker].queue.take(gateway.name, share, now)

    def _by_name(self, name: str) -> _Worker:
        return self._workers[int(name[1:])]


def _keys(request: SimRequest) -> list[bytes]:
    return [block.to_bytes(8, "little") for block in request.blocks]


def _learn(gateway: _Gateway, worker: str, sample: tuple[int, int, float], _: float) -> None:
    gateway.known[worker].times.observe(*sample)
    share_priors([known.times for known in gateway.known.values()])


def _expect(gateway: _Gateway, leg: str, node_id: str, keys: list[bytes], _: float) -> None:
    gateway.expected.hear(leg, node_id, keys)


def _arrived(gateway: _Gateway, leg: str, _: float) -> None:
    gateway.expected.forget(leg)
