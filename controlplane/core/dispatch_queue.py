"""The queue in a gateway before one prefill worker: who goes next when the worker has room.

Strict order of priority classes; within a class a share for requests with hits and one for the
others, so that neither waits for the other for long (R32); within each, deficit round robin
between tenants. A leg goes at once while the worker has room and nobody waits.

Where several gateways send to the worker, they share its window by what they tell each other: see
`Beside`. Each may always have one leg there, so that none starves on old news.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from controlplane.core.fairness import QueuedLeg, TenantRounds

NO_WEIGHTS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class QueueRules:
    """Of the admission policy. The worker is given `window_tokens` of uncached tokens and
    `window_seconds` of predicted work at a time (one leg always may go); `hit_share`: of the tokens
    served while both kinds wait."""

    window_tokens: int = 8192
    window_seconds: float = 0.25
    hit_share: float = 0.5
    quantum_tokens: int = 2048
    max_waiting: int = 512
    fair: bool = True
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beside:
    """What other gateways have given the same worker, of its window, and what waits at each of
    them: predicted seconds by class."""

    tokens: int = 0
    seconds: float = 0.0
    waiting: tuple[Mapping[int, float], ...] = ()

    def part(self, rank: int) -> float:
        """Of the window, for a leg of this class: who waits for the same class shares it, a higher
        class elsewhere goes first."""
        firsts = [min(classes) for classes in self.waiting if classes]
        if any(first < rank for first in firsts):
            return 0.0
        return 1.0 / (1 + firsts.count(rank))

    def ahead_seconds(self, rank: int, own_seconds: float) -> float:
        """Waiting seconds of others that go before a leg which `own_seconds` of its own class,
        itself included, bring to its end here: gateways take turns."""
        return sum(
            sum(seconds for other, seconds in classes.items() if other < rank)
            + min(classes.get(rank, 0.0), own_seconds)
            for classes in self.waiting
        )


ALONE = Beside()


class Offer(Enum):
    """What came of a leg that was offered."""

    GO = "go"
    WAIT = "wait"
    FULL = "full"  # nothing is held for it


@dataclass(frozen=True, slots=True)
class Offered:
    """`shed`: a waiting leg of a lower class that made room, if one did; `granted`: others that
    may go now because of that."""

    offer: Offer
    shed: QueuedLeg | None = None
    granted: tuple[QueuedLeg, ...] = ()


_GO, _WAIT, _FULL = Offered(Offer.GO), Offered(Offer.WAIT), Offered(Offer.FULL)


class _Class:
    """The waiting legs of one priority class: those with hits and those without."""

    __slots__ = ("lanes", "served")

    def __init__(self, rules: QueueRules) -> None:
        weights = rules.weights if rules.fair else NO_WEIGHTS
        self.lanes = {hit: TenantRounds(rules.quantum_tokens, weights) for hit in (True, False)}
        self.served = {True: 0.0, False: 0.0}  # tokens over share, as virtual time

    @property
    def num_waiting(self) -> int:
        return self.lanes[True].num_waiting + self.lanes[False].num_waiting

    @property
    def seconds(self) -> float:
        return self.lanes[True].seconds + self.lanes[False].seconds

    def push(self, leg: QueuedLeg) -> None:
        lane, other = self.lanes[leg.hit], self.lanes[not leg.hit]
        if not lane.num_waiting and other.num_waiting:  # idle time is no credit
            self.served[leg.hit] = max(self.served[leg.hit], self.served[not leg.hit])
        lane.push(leg)

    def next_lane(self) -> bool:
        """Whether hits are next: the only ones waiting, or the less served; hits first."""
        if not self.lanes[True].num_waiting or not self.lanes[False].num_waiting:
            return self.lanes[True].num_waiting > 0
        return self.served[True] <= self.served[False]


@dataclass(slots=True)
class DispatchQueue:
    """Legs given to one worker, and those that wait for it."""

    rules: QueueRules = field(default_factory=QueueRules)
    running_tokens: int = 0
    running_seconds: float = 0.0
    num_waiting: int = 0
    beside: Beside = ALONE
    _running: dict[str, QueuedLeg] = field(default_factory=dict)
    _waiting: dict[str, QueuedLeg] = field(default_factory=dict)
    _classes: dict[int, _Class] = field(default_factory=dict)  # by rank

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    def offer(self, leg: QueuedLeg) -> Offered:
        """Run it, let it wait, or refuse it. A full queue sheds a lower class for a higher one."""
        assert leg.request_id not in self, f"{leg.request_id} is here already"
        if not self.num_waiting and self._has_room(leg):
            self._start(leg)
            return _GO
        shed: QueuedLeg | None = None
        if self.num_waiting >= self.rules.max_waiting:
            shed = self._lowest(below=leg.rank)
            if shed is None:
                return _FULL
            self._drop(shed)
        self._push(leg)
        granted = self._grant()  # it may outrank a head that does not fit
        if shed is None and not granted:
            return _WAIT
        others = tuple(other for other in granted if other is not leg)
        return Offered(Offer.WAIT if len(others) == len(granted) else Offer.GO, shed, others)

    def start(self, leg: QueuedLeg) -> None:
        """Run it at once, whatever runs or waits."""
        assert leg.request_id not in self, f"{leg.request_id} is here already"
        self._start(leg)

    def is_free(self, leg: QueuedLeg) -> bool:
        """Whether it would run at once."""
        return not self.num_waiting and self._has_room(leg)

    def leave(self, request_id: str) -> list[QueuedLeg]:
        """It has run, or it stops waiting. Idempotent. Who goes instead is in the result."""
        leg = self._running.pop(request_id, None)
        if leg is not None:
            self.running_tokens -= leg.cost
            self.running_seconds = self.running_seconds - leg.seconds if self._running else 0.0
            return self._grant() if self.num_waiting else []
        leg = self._waiting.get(request_id)
        if leg is None:
            return []
        self._drop(leg)
        return self._grant()  # it may have been a head that did not fit

    def set_rules(self, rules: QueueRules) -> list[QueuedLeg]:
        """A new policy acts on those who wait, too. Who goes by it is in the result."""
        if rules == self.rules:
            return []
        self.rules = rules
        legs = list(self._waiting.values())
        self.num_waiting = 0
        self._waiting, self._classes = {}, {}
        for leg in legs:
            self._push(leg)
        return self._grant()

    def set_beside(self, beside: Beside) -> list[QueuedLeg]:
        """What other gateways have there now. Who goes because of it is in the result."""
        self.beside = beside
        return self._grant() if self.num_waiting else []

    def waiting_by_class(self) -> dict[int, tuple[int, float]]:
        """Legs and their predicted seconds."""
        return {rank: (one.num_waiting, one.seconds) for rank, one in self._classes.items()}

    def flush(self) -> list[QueuedLeg]:
        """The worker takes no more: all who wait leave, in order of arrival."""
        legs = list(self._waiting.values())
        self.num_waiting = 0
        self._waiting, self._classes = {}, {}
        return legs

    def ahead_seconds(self, rank: int, hit: bool, tenant: str, seconds: float) -> float:
        """Predicted seconds of waiting legs that go before a new one, as things are now."""
        ahead, same = self._own_ahead(rank, hit, tenant, seconds)
        if self.beside.waiting:
            ahead += self.beside.ahead_seconds(rank, same + seconds)
        return ahead + same

    def _own_ahead(self, rank: int, hit: bool, tenant: str, seconds: float) -> tuple[float, float]:
        """Of this gateway's: of higher classes, and of the same one."""
        if not self.num_waiting:
            return 0.0, 0.0
        ahead = sum(entry.seconds for other, entry in self._classes.items() if other < rank)
        own = self._classes.get(rank)
        if own is None:
            return ahead, 0.0
        lane, other_lane = own.lanes[hit], own.lanes[not hit]
        tenant = tenant if self.rules.fair else ""
        before = lane.ahead_seconds(tenant, seconds)
        share = self.rules.hit_share if hit else 1 - self.rules.hit_share
        between = min(other_lane.seconds, (before + seconds) * (1 - share) / share)
        return ahead, before + between

    def check_integrity(self) -> None:
        """Counts agree, no class is empty, nobody waits while the worker is idle."""
        assert self.running_tokens == sum(leg.cost for leg in self._running.values())
        drift = self.running_seconds - sum(leg.seconds for leg in self._running.values())
        assert abs(drift) < 1e-6, drift
        assert not self._running.keys() & self._waiting.keys(), "runs and waits"
        assert self.num_waiting == len(self._waiting)
        queued = [leg for c in self._classes.values() for lane in c.lanes.values()
                  for leg in lane.legs()]  # fmt: skip
        assert len(queued) == len(self._waiting)
        assert all(entry.num_waiting for entry in self._classes.values())
        for entry in self._classes.values():
            for lane in entry.lanes.values():
                lane.check_integrity()
        assert self._running or not self._waiting, "the worker idles, others wait"

    def _has_room(self, leg: QueuedLeg) -> bool:
        if not self._running:
            return True
        tokens, seconds = self.rules.window_tokens, self.rules.window_seconds
        if self.beside is not ALONE:
            part = self.beside.part(leg.rank)
            tokens = min(round(part * tokens), tokens - self.beside.tokens)
            seconds = min(part * seconds, seconds - self.beside.seconds)
        if self.running_tokens + leg.cost > tokens:
            return False
        return self.running_seconds + leg.seconds <= seconds

    def _start(self, leg: QueuedLeg) -> None:
        self._running[leg.request_id] = leg
        self.running_tokens += leg.cost
        self.running_seconds += leg.seconds

    def _push(self, leg: QueuedLeg) -> None:
        entry = self._classes.get(leg.rank)
        if entry is None:
            entry = self._classes[leg.rank] = _Class(self.rules)
        entry.push(leg if self.rules.fair else _tenantless(leg))
        self._waiting[leg.request_id] = leg
        self.num_waiting += 1

    def _grant(self) -> list[QueuedLeg]:
        granted: list[QueuedLeg] = []
        while self.num_waiting:
            rank = min(self._classes)
            entry = self._classes[rank]
            hit = entry.next_lane()
            head = entry.lanes[hit].peek()
            assert head is not None
            if not self._has_room(head):
                break
            leg = self._waiting[entry.lanes[hit].pop().request_id]
            share = self.rules.hit_share if hit else 1 - self.rules.hit_share
            entry.served[hit] += leg.cost / share
            self._forget(leg, entry)
            self._start(leg)
            granted.append(leg)
        return granted

    def _drop(self, leg: QueuedLeg) -> None:
        entry = self._classes[leg.rank]
        entry.lanes[leg.hit].remove(leg if self.rules.fair else _tenantless(leg))
        self._forget(leg, entry)

    def _forget(self, leg: QueuedLeg, entry: _Class) -> None:
        del self._waiting[leg.request_id]
        self.num_waiting -= 1
        if not entry.num_waiting:
            del self._classes[leg.rank]

    def _lowest(self, below: int) -> QueuedLeg | None:
        """The newest waiting leg of the lowest class, if that is lower than `below`."""
        rank = max(self._classes, default=below)
        if rank <= below:
            return None
        lanes = self._classes[rank].lanes
        lane = max(lanes.values(), key=lambda lane: lane.seconds if lane.num_waiting else -1.0)
        return self._waiting[lane.newest().request_id]


def _tenantless(leg: QueuedLeg) -> QueuedLeg:
    return QueuedLeg(leg.request_id, leg.tokens, leg.seconds, leg.rank, leg.hit)
