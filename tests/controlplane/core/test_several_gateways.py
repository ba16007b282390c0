"""Gateways that share workers: together they give one no more than one may, and none starves."""

from __future__ import annotations

import math
import random

import pytest

from controlplane.core.agreement import BOUND_SECONDS, Agreement
from controlplane.core.dispatch_queue import ALONE, Beside, DispatchQueue, Offer, QueueRules
from controlplane.core.fairness import QueuedLeg
from controlplane.core.pairing import DecodeSlots, SlotLimit, SlotsBeside

WINDOW = 4000
RULES = QueueRules(window_tokens=WINDOW, window_seconds=math.inf)


def leg(name: str, tokens: int = 1000, rank: int = 0) -> QueuedLeg:
    return QueuedLeg(name, tokens, tokens / 1000, rank)


class Windows:
    """Queues of several gateways before one worker, which tell each other at once."""

    def __init__(self, count: int) -> None:
        self.queues = [DispatchQueue(RULES) for _ in range(count)]
        self.running: list[tuple[int, QueuedLeg]] = []
        self.served = [0] * count
        self.legs: dict[str, QueuedLeg] = {}

    def offer(self, gateway: int, one: QueuedLeg) -> None:
        self.legs[one.request_id] = one
        if self.queues[gateway].offer(one).offer is Offer.GO:
            self.running.append((gateway, one))
        self.tell()

    def end(self, index: int = 0) -> None:
        gateway, one = self.running.pop(index)
        self.served[gateway] += one.tokens
        self._granted(gateway, self.queues[gateway].leave(one.request_id))
        self.tell()

    def tell(self) -> None:
        for i in range(len(self.queues)):
            others = [queue for k, queue in enumerate(self.queues) if k != i]
            waiting = tuple(
                {rank: seconds for rank, (_, seconds) in other.waiting_by_class().items()}
                for other in others
                if other.num_waiting
            )
            beside = Beside(sum(o.running_tokens for o in others), 0.0, waiting)
            self._granted(i, self.queues[i].set_beside(beside))
            self.queues[i].check_integrity()

    def _granted(self, gateway: int, granted: list[QueuedLeg]) -> None:
        self.running += [(gateway, one) for one in granted]

    @property
    def tokens(self) -> int:
        return sum(one.tokens for _, one in self.running)


@pytest.mark.parametrize("count", [2, 3])
def test_windows_of_several_gateways_are_one(count: int) -> None:
    """Beside the one leg that each may always have there."""
    windows, rng = Windows(count), random.Random(5)
    for number in range(600):
        windows.offer(rng.randrange(count), leg(f"r{number}", rng.randrange(100, 2000)))
        beyond = sorted(one.tokens for _, one in windows.running)[-(count - 1) :]
        assert windows.tokens <= WINDOW + sum(beyond)
        if rng.random() < 0.9 and windows.running:
            windows.end()
    while windows.running:
        windows.end()
    assert all(queue.num_waiting == 0 for queue in windows.queues)
    assert sum(windows.served) == sum(one.tokens for one in windows.legs.values())


def test_gateways_whose_queues_last_are_served_alike() -> None:
    windows = Windows(2)
    for number in range(80):
        windows.offer(0, leg(f"a{number}"))  # the first comes with all it has
    for number in range(80):
        windows.offer(1, leg(f"b{number}"))
    while windows.served[0] + windows.served[1] < 60_000:
        windows.end()
        assert windows.tokens <= WINDOW + 1000
    assert windows.served[1] == pytest.approx(windows.served[0], rel=0.2)


def test_one_leg_larger_than_the_window_goes_at_each_gateway() -> None:
    windows = Windows(2)
    for name in ("a", "b"):
        windows.offer("ab".index(name), leg(name, 50_000))
        windows.offer("ab".index(name), leg(name + "2", 50_000))
    assert [one.request_id for _, one in windows.running] == ["a", "b"]
    windows.end()
    assert [one.request_id for _, one in windows.running] == ["b", "a2"]


def test_a_higher_class_at_another_gateway_goes_first() -> None:
    queue = DispatchQueue(RULES)
    queue.set_beside(Beside(1000, 1.0, ({0: 5.0},)))
    assert queue.offer(leg("one", rank=1)).offer is Offer.GO  # one leg always may
    assert queue.offer(leg("low", rank=1)).offer is Offer.WAIT
    assert queue.offer(leg("high", rank=0)).offer is Offer.GO
    assert [one.request_id for one in queue.set_beside(ALONE)] == ["low"]


def test_what_waits_elsewhere_is_part_of_a_prediction() -> None:
    queue = DispatchQueue(RULES)
    queue.set_beside(Beside(WINDOW, 4.0, ({0: 3.0, 1: 50.0}, {1: 0.5})))
    assert queue.ahead_seconds(0, hit=False, tenant="", seconds=1.0) == 1.0  # by turns
    assert queue.ahead_seconds(1, hit=False, tenant="", seconds=2.0) == 3.0 + 2.0 + 0.5


class TestSlots:
    def tell(self, *gateways: DecodeSlots) -> None:
        for slots in gateways:
            others = [other for other in gateways if other is not slots]
            waiting = [other.waiting("m") for other in others]
            beside = SlotsBeside(
                sum(other.running("d1") for other in others), 0,
                sum(count > 0 for count in waiting), sum(waiting),
            )  # fmt: skip
            slots.set_beside("d1", beside)
            slots.check_integrity()

    def test_slots_of_two_gateways_are_one_workers(self) -> None:
        a, b = DecodeSlots(), DecodeSlots()
        for slots in (a, b):
            slots.set_limits({"d1": SlotLimit("m", 4)})
        for number in range(4):
            a.take(f"a{number}", "d1")
        self.tell(a, b)
        assert b.room("d1", 4) == 0
        for number in range(4):
            assert a.wait(f"wa{number}", "m")
            assert b.wait(f"wb{number}", "m")
        self.tell(a, b)
        for number in range(4):  # what a frees beyond its half is b's
            a.free(f"a{number}")
            self.tell(a, b)
            assert a.running("d1") + b.running("d1") <= 4
        assert a.running("d1") == b.running("d1") == 2

    def test_what_is_not_told_any_more_is_free(self) -> None:
        slots = DecodeSlots()
        slots.set_limits({"d1": SlotLimit("m", 2)})
        slots.set_beside("d1", SlotsBeside(slots=2))
        assert slots.wait("a", "m")
        assert slots.running("d1") == 0
        assert [grant.request_id for grant in slots.set_beside("d1", None)] == ["a"]


def test_agreement_is_by_what_the_others_choice_would_cost() -> None:
    agreement = Agreement()
    candidates = [("p1", 1.0), ("p2", 1.0 + BOUND_SECONDS), ("p3", 2.0), ("p4", 0.9)]
    for choice in ("p1", "p2", "p3", "p4"):
        agreement.count(candidates, choice)
    assert (agreement.asked, agreement.same, agreement.within) == (4, 1, 3)
    assert agreement.summary()["excess_p95_seconds"] == pytest.approx(1.0)
    agreement.count(candidates, "gone")
    assert agreement.summary()["within_bound_share"] == 0.6
