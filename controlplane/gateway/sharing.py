"""Several gateways: what this one tells the others of its load, and what it takes from theirs.

Nothing goes from gateway to gateway: each tells the agent of a node of its load at the workers there,
and hears on that node's event stream what others told. A gateway that is alone tells nothing.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

import structlog

from controlplane.core.dispatch_queue import ALONE, Beside
from controlplane.core.expected import Change
from controlplane.core.pairing import SlotsBeside
from controlplane.core.prefill_queue import STALE_SECONDS, QueueShare
from controlplane.gateway.cluster import Cluster
from controlplane.gateway.worker_state import WorkerState
from workers.core.gateway_messages import (
    MAX_CHAIN_BYTES,
    MAX_CLASSES,
    MAX_LEGS,
    MAX_SAMPLES,
    MAX_SHARES,
    ComingBlocks,
    DecodeSample,
    GatewayShare,
    PrefillSample,
    TellShare,
    WorkerShare,
)
from workers.core.hashing import BLOCK_HASH_BYTES
from workers.core.messages import Refused

log = structlog.get_logger(__name__)

TELL_SECONDS: Final = 0.005
TELL_AGAIN_SECONDS: Final = STALE_SECONDS / 4
CHAIN_SECONDS: Final = 120.0
"""After which another gateway's leg is taken to have ended."""
MAX_CHANGES: Final = 4096
MAX_REFUSALS: Final = 16
"""Reasons of one agent that are told apart; more are counted alone."""
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
T = TypeVar("T")
S = TypeVar("S", PrefillSample, DecodeSample)
_Mark = tuple[int, ...]
Tell = Callable[[TellShare], bool]


@dataclass(slots=True)
class Neighbours:
    """The other gateways at one node."""

    names: set[str] = field(default_factory=set)
    told: dict[str, _Mark] = field(default_factory=dict)  # by worker
    told_at: float = 0.0
    coming: deque[ComingBlocks] = field(default_factory=lambda: deque(maxlen=4 * MAX_LEGS))
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=4 * MAX_LEGS))
    chains: dict[str, float] = field(default_factory=dict)  # others' legs, since when; oldest first
    refusals: set[str] = field(default_factory=set)  # that were logged

    def news(self, changes: Iterable[Change]) -> None:
        """Legs of ours that come to this node, or do so no more."""
        for leg, _, keys in changes:
            if keys:
                joined = b"".join(keys[: MAX_CHAIN_BYTES // BLOCK_HASH_BYTES])
                self.coming.append(ComingBlocks(leg, joined))
            else:
                self.ended.append(leg)

    def forget_us(self) -> None:
        """Nobody there knows anything of us."""
        self.told.clear()
        self.coming.clear()
        self.ended.clear()


@dataclass(slots=True)
class _Heard:
    share: WorkerShare
    at: float


class Sharing:
    """`tell` for each node every `TELL_SECONDS`, `hear` what its stream brings, `expire` sometimes.
    All of the event loop's thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._heard: dict[str, dict[str, _Heard]] = {}  # worker -> gateway

    # --- telling ---

    def tell(
        self, neighbours: Neighbours, workers: list[WorkerState], tell: Tell, now: float
    ) -> None:
        """What has changed at these workers, or lasts; `tell` says whether it went out."""
        if not neighbours.names:
            neighbours.forget_us()
            return
        workers, told = workers[:MAX_SHARES], neighbours.told
        marks = {state.row.id: _mark(self._cluster, state) for state in workers}
        changed = {name for name, mark in marks.items() if mark != told.get(name)}
        news = changed or neighbours.coming or neighbours.ended
        if not news and now - neighbours.told_at <= TELL_AGAIN_SECONDS:
            return
        shares = [_share(self._cluster, state, now) for state in workers]
        named = [share for share in shares if share.worker_id in changed or not share.is_idle]
        if not news and not named:
            neighbours.told_at = now
            return
        prefills = list(islice(_untold_prefills(workers), MAX_SAMPLES))
        decodes = list(islice(_untold_decodes(workers), MAX_SAMPLES))
        coming, ended = _taken(neighbours.coming), _taken(neighbours.ended)
        if tell(TellShare(named, prefills, decodes, coming, ended)):
            neighbours.told, neighbours.told_at = marks, now

    def refused(self, neighbours: Neighbours, address: str, refusal: Refused) -> None:
        """The agent there passed our load on to nobody; each reason is said once."""
        self._cluster.stats.shares_refused += 1
        reason = f"{refusal.code} {_NUMBER.sub('#', refusal.message)}"
        if reason in neighbours.refusals or len(neighbours.refusals) >= MAX_REFUSALS:
            return
        neighbours.refusals.add(reason)
        log.warning(
            "share_refused", agent=address, code=refusal.code, reason=refusal.message,
            effect="the other gateways there do not know of this one's load",
        )  # fmt: skip

    def changes(self, *, wanted: bool) -> dict[str, list[Change]]:
        """Of prompts on their way, by node, since the last call; they are noted while `wanted`."""
        expected, by_node = self._cluster.expected, dict[str, list[Change]]()
        if not wanted:
            expected.changes = None
        elif expected.changes is None:
            expected.changes = deque(maxlen=MAX_CHANGES)
        while expected.changes:
            change = expected.changes.popleft()
            by_node.setdefault(change[1], []).append(change)
        return by_node

    # --- hearing ---

    def hear(self, node_id: str, neighbours: Neighbours, told: GatewayShare, now: float) -> None:
        """One gateway's whole load at one node."""
        if told.gone:
            neighbours.names.discard(told.gateway)
        else:
            if told.gateway not in neighbours.names:
                neighbours.told.clear()  # it knows nothing of us
            neighbours.names.add(told.gateway)
        named = {share.worker_id: share for share in told.shares}
        for state in self._cluster.workers.values():
            if state.row.node_id == node_id:
                self._take(state, told, named.get(state.row.id), now)
        self._expect(node_id, neighbours, told, now)
        for worker_id, samples in _by_worker(told.prefills):
            self._learn(worker_id, node_id, prefills=samples)
        for worker_id, others in _by_worker(told.decodes):
            self._learn(worker_id, node_id, decodes=others)

    def _expect(self, node_id: str, neighbours: Neighbours, told: GatewayShare, now: float) -> None:
        """Blocks that another gateway's legs will leave."""
        expected, chains, prefix = self._cluster.expected, neighbours.chains, f"{told.gateway}/"
        for one in told.coming:
            keys = one.keys
            step = range(0, len(keys), BLOCK_HASH_BYTES)
            chain = [keys[at : at + BLOCK_HASH_BYTES] for at in step]
            if expected.hear(prefix + one.leg, node_id, chain):
                chains[prefix + one.leg] = now
        over = [prefix + leg for leg in told.ended]
        if told.gone:
            over += [leg for leg in chains if leg.startswith(prefix)]
        for leg in over:
            if chains.pop(leg, None) is not None:
                expected.forget(leg)

    def expire_chains(self, neighbours: Neighbours, now: float) -> None:
        """Legs whose end nobody told; all of them with `now` infinite."""
        for leg, since in list(neighbours.chains.items()):
            if now - since <= CHAIN_SECONDS:
                return
            del neighbours.chains[leg]
            self._cluster.expected.forget(leg)

    def expire(self, now: float) -> None:
        """What was told too long ago counts no more."""
        for worker_id, by_gateway in list(self._heard.items()):
            old = [name for name, heard in by_gateway.items() if now - heard.at > STALE_SECONDS]
            for name in old:
                del by_gateway[name]
            if old:
                self._set_beside(worker_id)
            state = self._cluster.workers.get(worker_id)
            if state is not None:
                state.prefill_queue.expire(now)

    @property
    def num_heard(self) -> int:
        """Gateways at workers whose load counts now."""
        return sum(map(len, self._heard.values()))

    def _take(
        self, state: WorkerState, told: GatewayShare, share: WorkerShare | None, now: float
    ) -> None:
        name, queue, by_gateway = state.row.id, state.prefill_queue, self._heard.get(state.row.id)
        if told.gone:
            queue.forget(told.gateway)
        elif share is None:
            queue.idle(told.gateway)
        else:
            queue.take(told.gateway, _queue_share(share), now)
        if share is not None and not told.gone and not share.is_idle:
            if by_gateway is None:
                by_gateway = self._heard[name] = {}
            by_gateway[told.gateway] = _Heard(share, now)
        elif by_gateway is None or by_gateway.pop(told.gateway, None) is None:
            return
        self._set_beside(name)

    def _set_beside(self, worker_id: str) -> None:
        """Let the queues before the worker know."""
        shares = [heard.share for heard in self._heard.get(worker_id, {}).values()]
        if not shares:
            self._heard.pop(worker_id, None)
            self._cluster.dispatch.set_beside(worker_id, ALONE)
            self._cluster.set_slots_beside(worker_id, None)
            return
        waiting = tuple(
            {rank: seconds for rank, _, seconds in share.waiting}
            for share in shares
            if share.waiting
        )
        tokens = sum(share.window_tokens for share in shares)
        seconds = sum(share.window_seconds for share in shares)
        self._cluster.dispatch.set_beside(worker_id, Beside(tokens, seconds, waiting))
        slots = SlotsBeside(
            sum(share.slots for share in shares),
            sum(share.kv_tokens for share in shares),
            sum(share.slots_waiting > 0 for share in shares),
            sum(share.slots_waiting for share in shares),
        )
        self._cluster.set_slots_beside(worker_id, slots)

    def _learn(
        self, worker_id: str, node_id: str,
        prefills: Iterable[PrefillSample] = (), decodes: Iterable[DecodeSample] = (),
    ) -> None:  # fmt: skip
        state = self._cluster.workers.get(worker_id)
        if state is not None and state.row.node_id == node_id:
            state.heard(
                [(one.computed_tokens, one.cached_tokens, one.seconds) for one in prefills],
                [(one.running, one.tbt_seconds, one.kv_tokens) for one in decodes],
            )


def _mark(cluster: Cluster, state: WorkerState) -> _Mark:
    """Differs when this gateway's load at the worker does. Cheap: often asked."""
    row, queue, slots = state.row, state.prefill_queue, cluster.slots
    window = cluster.dispatch.queue(row.id)
    turns = (window.num_running, window.num_waiting) if window is not None else (0, 0)
    return (len(queue), queue.ended, *turns, slots.running(row.id), slots.waiting(row.model))


def _share(cluster: Cluster, state: WorkerState, now: float) -> WorkerShare:
    """This gateway's load at one worker. Sums of floats drift, and nobody believes in negative ones."""
    row, queue = state.row, state.prefill_queue.share(now)
    window, slots = cluster.dispatch.queue(row.id), cluster.slots
    tokens, seconds, waiting = 0, 0.0, []
    if window is not None:
        tokens, seconds = window.running_tokens, max(0.0, window.running_seconds)
        if window.num_waiting:
            by_class = sorted(window.waiting_by_class().items())
            waiting = [
                (rank, legs, max(0.0, time)) for rank, (legs, time) in by_class[:MAX_CLASSES]
            ]
    return WorkerShare(
        row.id, queue.legs, max(0.0, queue.seconds), queue.head_seconds, queue.head_age, queue.ended,
        queue.ended_age, tokens, seconds, waiting, slots.running(row.id), slots.kv_tokens(row.id),
        slots.waiting(row.model) if row.role != "prefill" else 0,
    )  # fmt: skip


def _queue_share(share: WorkerShare) -> QueueShare:
    return QueueShare(
        share.legs, share.seconds, share.head_seconds, share.head_age, share.legs_ended,
        share.ended_age,
    )  # fmt: skip


def _taken(news: deque[T]) -> list[T]:
    return [news.popleft() for _ in range(min(len(news), MAX_LEGS))]


def _untold_prefills(workers: list[WorkerState]) -> Iterator[PrefillSample]:
    for state in workers:
        while state.untold_prefills:
            yield PrefillSample(state.row.id, *state.untold_prefills.popleft())


def _untold_decodes(workers: list[WorkerState]) -> Iterator[DecodeSample]:
    for state in workers:
        while state.untold_decodes:
            yield DecodeSample(state.row.id, *state.untold_decodes.popleft())


def _by_worker(
    samples: Iterable[S],
) -> Iterator[tuple[str, list[S]]]:
    by_worker: dict[str, list[S]] = {}
    for sample in samples:
        by_worker.setdefault(sample.worker_id, []).append(sample)
    yield from by_worker.items()
