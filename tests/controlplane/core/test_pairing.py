"""Decode slots: never over the cap, refilled at once, every slot freed once."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.core.pairing import DecodeSlots, SlotLimit


def test_a_freed_slot_goes_to_the_next_waiting_at_once() -> None:
    slots = DecodeSlots()
    slots.set_limits({"d1": SlotLimit("m", 1)})
    slots.take("a", "d1")
    assert slots.wait("b", "m")
    assert slots.wait("c", "m")
    assert [(g.request_id, g.worker_id) for g in slots.free("a")] == [("b", "d1")]
    assert slots.free("a") == []  # idempotent
    assert slots.waiting("m") == 1


def test_room_that_was_not_taken_is_offered_again() -> None:
    """A worker that may be sent nothing for a while has room although somebody waits."""
    slots = DecodeSlots()
    slots.set_limits({"d1": SlotLimit("m", 2), "d2": SlotLimit("m", 0)})
    for name in "abc":
        assert slots.wait(name, "m")
    assert slots.offer("d2", 5) == []
    assert [(g.request_id, g.worker_id) for g in slots.offer("d1", 1)] == [("a", "d1")]
    assert [g.request_id for g in slots.offer("d1", 5)] == ["b"]
    assert slots.offer("d1", 5) == []
    slots.check_integrity()


def test_models_do_not_mix() -> None:
    slots = DecodeSlots()
    slots.set_limits({"d1": SlotLimit("m", 1), "d2": SlotLimit("other", 1)})
    slots.take("a", "d1")
    slots.take("x", "d2")
    assert slots.wait("b", "m")
    assert slots.free("x") == []
    assert [g.request_id for g in slots.free("a")] == ["b"]


def test_the_queue_is_bounded_and_can_be_left() -> None:
    slots = DecodeSlots(max_waiting=1)
    slots.set_limits({"d1": SlotLimit("m", 0)})
    assert slots.wait("a", "m")
    assert not slots.wait("b", "m")
    assert slots.leave("a", "m")
    assert not slots.leave("a", "m")
    assert slots.wait("b", "m")


def test_a_raised_cap_admits_those_who_wait() -> None:
    slots = DecodeSlots()
    slots.set_limits({"d1": SlotLimit("m", 0)})
    for name in ("a", "b", "c"):
        assert slots.wait(name, "m")
    assert [g.request_id for g in slots.set_limits({"d1": SlotLimit("m", 2)})] == ["a", "b"]


class SlotsMachine(RuleBasedStateMachine):
    """A shell that does what the gateway does."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = DecodeSlots(max_waiting=4)
        self.caps = {"d1": 1, "d2": 2}
        self.holding: set[str] = set()
        self.waiting: set[str] = set()
        self.number = 0
        self._limits()

    def _limits(self) -> None:
        limits = {name: SlotLimit("m", cap) for name, cap in self.caps.items()}
        self._granted(self.slots.set_limits(limits))

    def _granted(self, grants: list) -> None:
        for grant in grants:
            assert grant.request_id in self.waiting
            self.waiting.remove(grant.request_id)
            self.holding.add(grant.request_id)

    @rule()
    def arrive(self) -> None:
        self.number += 1
        name = f"r{self.number}"
        free = [w for w, cap in self.caps.items() if self.slots.running(w) < cap]
        if free:
            self.slots.take(name, free[0])
            self.holding.add(name)
        elif self.slots.wait(name, "m"):
            self.waiting.add(name)

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.holding)))
        self.holding.remove(name)
        self._granted(self.slots.free(name))
        assert self.slots.free(name) == []

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.remove(name)
        assert self.slots.leave(name, "m")

    @rule(cap=st.integers(0, 3), worker=st.sampled_from(["d1", "d2", "d3"]))
    def change_cap(self, cap: int, worker: str) -> None:
        self.caps[worker] = cap
        self._limits()

    @invariant()
    def sound(self) -> None:
        self.slots.check_integrity()
        assert sum(self.slots.running(w) for w in ("d1", "d2", "d3")) == len(self.holding)
        assert self.slots.num_waiting == len(self.waiting)


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_higher_class_is_granted_first_then_who_came_first() -> None:
    slots = DecodeSlots()
    slots.set_limits({"d1": SlotLimit("m", 1)})
    slots.take("a", "d1")
    for name, rank in (("batch", 2), ("b", 1), ("c", 1), ("interactive", 0), ("gone", 0)):
        assert slots.wait(name, "m", rank=rank)
        slots.check_integrity()
    assert slots.leave("gone", "m")
    order, last = [], "a"
    while granted := slots.free(last):
        slots.check_integrity()
        last = granted[0].request_id
        order.append(last)
    assert order == ["interactive", "b", "c", "batch"]
