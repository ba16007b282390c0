"""The dispatch queue: work conserving, nobody starves, fair between tenants, released once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from controlplane.core.dispatch_queue import DispatchQueue, Offer
from controlplane.core.dispatch_queue import QueueRules as Rules
from controlplane.core.fairness import QueuedLeg

WINDOW = 4096


def queue_rules(
    window_tokens: int = WINDOW, hit_share: float = 0.5, quantum_tokens: int = 2048,
    max_waiting: int = 512, fair: bool = True, weights: dict[str, float] | None = None,
    window_seconds: float = 1e9,
) -> Rules:  # fmt: skip
    return Rules(
        window_tokens, window_seconds, hit_share, quantum_tokens, max_waiting, fair, weights or {}
    )


def leg(name: str, tokens: int = 1000, **fields: object) -> QueuedLeg:
    return QueuedLeg(name, tokens, tokens / 1000, **fields)  # type: ignore[arg-type]


def busy(rules: Rules | None = None) -> DispatchQueue:
    """A worker that is full with the leg `first`."""
    queue = DispatchQueue(rules or queue_rules(window_tokens=WINDOW))
    assert queue.offer(leg("first", 100_000)).offer is Offer.GO
    return queue


def drain(queue: DispatchQueue, first: str = "first") -> list[QueuedLeg]:
    """Legs in the order in which they go, each running alone to its end."""
    order: list[QueuedLeg] = []
    ends = [first]
    while ends:
        granted = queue.leave(ends.pop(0))
        queue.check_integrity()
        order += granted
        ends += [g.request_id for g in granted]
    return order


def test_with_room_a_leg_passes_and_no_more_than_the_window_runs() -> None:
    queue = DispatchQueue(queue_rules(window_tokens=WINDOW))
    offers = [queue.offer(leg(f"r{i}", 2000)).offer for i in range(3)]
    assert offers == [Offer.GO, Offer.GO, Offer.WAIT]
    assert queue.running_tokens == 4000
    assert [g.request_id for g in queue.leave("r0")] == ["r2"]


def test_no_more_than_the_windows_seconds_run() -> None:
    queue = DispatchQueue(queue_rules(10_000, window_seconds=2.5))
    offers = [queue.offer(leg(f"r{i}", 1000)).offer for i in range(3)]
    assert offers == [Offer.GO, Offer.GO, Offer.WAIT]
    assert [g.request_id for g in queue.leave("r0")] == ["r2"]
    assert queue.running_seconds == 2.0


def test_a_leg_that_must_not_wait_goes_over_those_who_do_and_counts() -> None:
    queue = busy()
    assert queue.offer(leg("waits")).offer is Offer.WAIT
    queue.start(leg("urgent"))
    assert (queue.num_running, queue.num_waiting) == (2, 1)
    assert queue.leave("first")[0].request_id == "waits"
    assert queue.offer(leg("late", WINDOW)).offer is Offer.WAIT
    assert queue.leave("urgent") == []
    assert [g.request_id for g in queue.leave("waits")] == ["late"]
    queue.check_integrity()


def test_one_leg_larger_than_the_window_goes_alone() -> None:
    queue = DispatchQueue(queue_rules(window_tokens=WINDOW))
    assert queue.offer(leg("huge", 50_000)).offer is Offer.GO
    assert queue.offer(leg("small", 1)).offer is Offer.WAIT


def test_r32_hits_do_not_queue_behind_long_cold_prefills() -> None:
    queue = busy()
    for i in range(10):
        queue.offer(leg(f"cold{i}", 30_000))
    queue.offer(leg("hit", 200, hit=True))
    assert queue.ahead_seconds(0, True, "", 0.2) < 1.0
    assert queue.leave("first")[0].request_id == "hit"


def test_r32_cold_prefills_have_their_share_under_a_flood_of_hits() -> None:
    queue = busy(queue_rules(window_tokens=100, hit_share=0.75))
    for i in range(400):
        queue.offer(leg(f"hit{i}", 1000, hit=True))
    for i in range(40):
        queue.offer(leg(f"cold{i}", 1000))
    served = drain(queue)[:100]
    cold = sum(not g.hit for g in served)
    assert 23 <= cold <= 27


def test_higher_classes_go_first() -> None:
    queue = busy()
    for name, rank in (("batch", 2), ("standard", 1), ("interactive", 0), ("standard2", 1)):
        queue.offer(leg(name, 5000, rank=rank))
    assert [g.request_id for g in drain(queue)] == ["interactive", "standard", "standard2", "batch"]


def test_a_higher_class_goes_at_once_where_a_lower_head_does_not_fit() -> None:
    queue = DispatchQueue(queue_rules(window_tokens=WINDOW))
    queue.offer(leg("runs", 3000))
    assert queue.offer(leg("big", 4000, rank=1)).offer is Offer.WAIT
    assert queue.offer(leg("small", 500, rank=0)).offer is Offer.GO
    assert queue.offer(leg("small2", 500, rank=1)).offer is Offer.WAIT


def test_a_full_queue_sheds_the_lowest_class_first() -> None:
    queue = busy(queue_rules(window_tokens=WINDOW, max_waiting=2))
    queue.offer(leg("batch", rank=2))
    queue.offer(leg("standard", rank=1))
    assert queue.offer(leg("late batch", rank=2)).offer is Offer.FULL
    offered = queue.offer(leg("interactive", rank=0))
    assert offered.offer is Offer.WAIT
    assert offered.shed is not None
    assert offered.shed.request_id == "batch"
    assert queue.offer(leg("late standard", rank=1)).offer is Offer.FULL
    queue.check_integrity()


def test_tenants_share_tokens_not_requests() -> None:
    queue = busy(queue_rules(window_tokens=100, quantum_tokens=500))
    for i in range(40):
        queue.offer(leg(f"long{i}", 4000, tenant="long"))
        for k in range(4):
            queue.offer(leg(f"short{i}-{k}", 1000, tenant="short"))
    tokens: Counter[str] = Counter()
    for granted in drain(queue)[:100]:
        tokens[granted.tenant] += granted.tokens
    assert abs(tokens["long"] - tokens["short"]) <= 500 + 4000 + 1000


def test_weights_divide_tokens() -> None:
    queue = busy(queue_rules(window_tokens=100, quantum_tokens=500, weights={"gold": 3.0}))
    for i in range(100):
        queue.offer(leg(f"g{i}", 1000, tenant="gold"))
        queue.offer(leg(f"o{i}", 1000, tenant="other"))
    counted = Counter(g.tenant for g in drain(queue)[:80])
    assert 57 <= counted["gold"] <= 63


def test_without_fairness_first_come_first_served() -> None:
    queue = busy(queue_rules(window_tokens=100, fair=False))
    names = [f"r{i}" for i in range(10)]
    for i, name in enumerate(names):
        queue.offer(leg(name, 1000, tenant="a" if i < 8 else "b"))
    assert [g.request_id for g in drain(queue)] == names


def test_a_new_policy_acts_on_those_who_wait() -> None:
    queue = busy()
    queue.offer(leg("small", 10))
    granted = queue.set_rules(queue_rules(window_tokens=200_000))
    assert [g.request_id for g in granted] == ["small"]
    queue.check_integrity()


def test_ahead_is_what_is_served_before() -> None:
    queue = busy()
    for i in range(4):
        queue.offer(leg(f"own{i}", 1000, tenant="a", rank=1))
        queue.offer(leg(f"other{i}", 3000, tenant="b", rank=1))
    queue.offer(leg("urgent", 2000, rank=0))
    assert queue.ahead_seconds(0, False, "", 1.0) == 2.0
    assert queue.ahead_seconds(0, False, "a", 1.0) == 1.0
    assert queue.ahead_seconds(1, False, "a", 1.0) == 2.0 + 4.0 + 5.0
    assert queue.ahead_seconds(1, False, "new", 1.0) == 2.0 + 1.0 + 1.0
    assert queue.ahead_seconds(2, False, "a", 1.0) == 2.0 + 16.0


TENANTS = ("a", "b", "c")


@settings(deadline=None, max_examples=60)
@given(
    costs=st.lists(
        st.tuples(st.sampled_from(TENANTS), st.integers(16, 5000)), min_size=30, max_size=200
    ),
    quantum=st.integers(16, 4000),
)
def test_drr_bound_while_all_wait(costs: list[tuple[str, int]], quantum: int) -> None:
    """Of two tenants that wait all the time, neither gets more than a quantum and the dearest
    leg of each ahead of the other."""
    queue = busy(queue_rules(window_tokens=1, quantum_tokens=quantum))
    left: Counter[str] = Counter()
    for i, (tenant, tokens) in enumerate(costs):
        queue.offer(leg(f"r{i}", tokens, tenant=tenant))
        left[tenant] += 1
    dearest = max(tokens for _, tokens in costs)
    served: Counter[str] = Counter(dict.fromkeys(left, 0))
    for granted in drain(queue):
        served[granted.tenant] += granted.tokens
        left[granted.tenant] -= 1
        backlogged = [served[tenant] for tenant, count in left.items() if count]
        if len(backlogged) == len(left):
            assert max(backlogged) - min(backlogged) <= quantum + 2 * dearest
    assert not +left, "every leg is served"


class QueueMachine(RuleBasedStateMachine):
    """Any order of arrivals, ends, cancellations, new rules, and of workers that go."""

    @initialize(
        window=st.sampled_from([1, 500, 5000]),
        most=st.integers(0, 8),
        fair=st.booleans(),
        hit_share=st.sampled_from([0.05, 0.5, 0.95]),
    )
    def begin(self, window: int, most: int, fair: bool, hit_share: float) -> None:
        self.queue_rules = queue_rules(window, hit_share, 300, most, fair, {"a": 2.0})
        self.queue = DispatchQueue(self.queue_rules)
        self.waiting: dict[str, QueuedLeg] = {}
        self.running: dict[str, QueuedLeg] = {}
        self.number = 0

    def take(self, granted: list[QueuedLeg] | tuple[QueuedLeg, ...]) -> None:
        for one in granted:
            self.running[one.request_id] = self.waiting.pop(one.request_id)

    @rule(
        tokens=st.integers(0, 6000), rank=st.integers(0, 2), hit=st.booleans(),
        tenant=st.sampled_from(TENANTS),
    )  # fmt: skip
    def arrives(self, tokens: int, rank: int, hit: bool, tenant: str) -> None:
        self.number += 1
        new = QueuedLeg(f"r{self.number}", tokens, tokens / 1000, rank, hit, tenant)
        lowest = max((one.rank for one in self.waiting.values()), default=-1)
        offered = self.queue.offer(new)
        if offered.offer is Offer.FULL:
            assert len(self.waiting) >= self.queue_rules.max_waiting
            assert lowest <= rank, "a lower class waits and was not shed"
            return
        if offered.shed is not None:
            assert offered.shed.rank == lowest > rank
            del self.waiting[offered.shed.request_id]
        target = self.running if offered.offer is Offer.GO else self.waiting
        target[new.request_id] = new
        self.take(offered.granted)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        best = min((one.rank for one in self.waiting.values()), default=0)
        granted = self.queue.leave(name)
        if granted:
            assert granted[0].rank == best
        self.take(granted)
        assert self.queue.leave(name) == [], "released twice"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancelled(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[name]
        self.take(self.queue.leave(name))
        assert self.queue.leave(name) == []

    @rule(window=st.sampled_from([1, 500, 5000]), fair=st.booleans())
    def new_rules(self, window: int, fair: bool) -> None:
        self.queue_rules = queue_rules(window, 0.5, 300, self.queue_rules.max_waiting, fair)
        self.take(self.queue.set_rules(self.queue_rules))

    @rule()
    def worker_goes(self) -> None:
        assert [one.request_id for one in self.queue.flush()] == list(self.waiting)
        self.waiting.clear()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.check_integrity()
        assert self.queue.num_waiting == len(self.waiting)
        assert self.queue.num_running == len(self.running)
        assert self.queue.running_tokens == sum(one.cost for one in self.running.values())

    def teardown(self) -> None:
        """Everybody is served in the end."""
        if not hasattr(self, "queue"):
            return
        for _ in range(len(self.waiting) + len(self.running)):
            name = next(iter(self.running))
            del self.running[name]
            self.take(self.queue.leave(name))
        assert not self.waiting
        assert not self.running


QueueMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestQueueMachine = QueueMachine.TestCase
