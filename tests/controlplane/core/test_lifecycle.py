"""Whatever happens to a request, what it held is released exactly once."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controlplane.core.lifecycle import (
    ENDS,
    ClientLeft,
    CloseRecord,
    Command,
    DecodeRetried,
    DecodeStarted,
    EndPrefillLoad,
    Event,
    Failed,
    Finished,
    FreeSlot,
    HedgeEnded,
    HedgeStarted,
    InvalidTransitionError,
    Lifecycle,
    PrefillEnded,
    PrefillStarted,
    Rejected,
    ReleasePins,
    SlotTaken,
    State,
)

EVENTS = (
    Rejected(), SlotTaken("d1"), SlotTaken("d2"), PrefillStarted("p1"), PrefillEnded(),
    DecodeStarted(), DecodeRetried(), Finished(), Failed(), ClientLeft(),
    HedgeStarted("p2"), HedgeEnded("p1"), HedgeEnded("p2"),
)  # fmt: skip


def test_the_usual_walk() -> None:
    life = Lifecycle()
    assert not life.handle(SlotTaken("d1"))
    assert not life.handle(PrefillStarted("p1"))
    assert life.handle(PrefillEnded()) == [EndPrefillLoad("p1")]
    assert not life.handle(DecodeStarted())
    assert life.handle(Finished()) == [FreeSlot("d1"), ReleasePins(), CloseRecord(State.DONE)]
    assert not life.handle(ClientLeft())
    assert not life.handle(Failed())


def test_a_client_that_leaves_during_prefill() -> None:
    life = Lifecycle()
    life.handle(SlotTaken("d1"))
    life.handle(PrefillStarted("p1"))
    assert life.handle(ClientLeft()) == [
        EndPrefillLoad("p1"), FreeSlot("d1"), ReleasePins(), CloseRecord(State.CANCELLED),
    ]  # fmt: skip
    life.check_integrity()


def test_a_rejected_request_holds_nothing() -> None:
    assert Lifecycle().handle(Rejected()) == [CloseRecord(State.REJECTED)]


def test_an_impossible_event_tells_the_story() -> None:
    life = Lifecycle()
    life.handle(SlotTaken("d1"))
    with pytest.raises(InvalidTransitionError, match="SlotTaken > Finished"):
        life.handle(Finished())


def test_leg_2_may_be_sent_before_leg_1_is_over() -> None:
    life = Lifecycle()
    for event in (SlotTaken("d1"), PrefillStarted("p1"), DecodeStarted()):
        assert not life.handle(event)
    assert life.state is State.PREFILLING
    with pytest.raises(InvalidTransitionError):  # an answer before leg 1's would be unexplained
        life.handle(Finished())
    assert life.handle(PrefillEnded()) == [EndPrefillLoad("p1")]
    assert life.state is State.DECODING
    assert life.handle(Finished()) == [FreeSlot("d1"), ReleasePins(), CloseRecord(State.DONE)]


def test_prefill_is_tried_elsewhere_while_decode_waits() -> None:
    life = Lifecycle()
    for event in (SlotTaken("d1"), PrefillStarted("p1"), DecodeStarted(), PrefillEnded()):
        life.handle(event)
    life.handle(PrefillStarted("p2"))
    life.handle(DecodeRetried())  # and decode moves meanwhile
    life.handle(SlotTaken("d2"))
    life.handle(DecodeStarted())
    assert life.handle(ClientLeft()) == [
        EndPrefillLoad("p2"), FreeSlot("d2"), ReleasePins(), CloseRecord(State.CANCELLED),
    ]  # fmt: skip


@pytest.mark.parametrize(("loser", "winner"), [("p1", "p2"), ("p2", "p1")])
def test_of_two_prefill_legs_one_is_dropped_and_the_other_goes_on(loser: str, winner: str) -> None:
    life = Lifecycle()
    for event in (SlotTaken("d1"), PrefillStarted("p1"), HedgeStarted("p2")):
        assert not life.handle(event)
    assert life.handle(HedgeEnded(loser)) == [EndPrefillLoad(loser)]
    assert life.prefill_worker == winner
    assert life.handle(PrefillEnded()) == [EndPrefillLoad(winner)]
    life.handle(DecodeStarted())
    assert life.handle(Finished()) == [FreeSlot("d1"), ReleasePins(), CloseRecord(State.DONE)]


def test_a_client_that_leaves_ends_both_prefill_legs() -> None:
    life = Lifecycle()
    for event in (SlotTaken("d1"), PrefillStarted("p1"), HedgeStarted("p2")):
        life.handle(event)
    assert life.handle(ClientLeft()) == [
        EndPrefillLoad("p1"), EndPrefillLoad("p2"), FreeSlot("d1"), ReleasePins(),
        CloseRecord(State.CANCELLED),
    ]  # fmt: skip
    life.check_integrity()


@pytest.mark.parametrize("event", [HedgeStarted("p1"), HedgeStarted("p3"), DecodeStarted()])
def test_no_third_leg_and_no_decode_beside_two_prefill_legs(event: Event) -> None:
    life = Lifecycle()
    for before in (SlotTaken("d1"), PrefillStarted("p1"), HedgeStarted("p2")):
        life.handle(before)
    with pytest.raises(InvalidTransitionError):
        life.handle(event)


class Ownership(RuleBasedStateMachine):
    """Any order of events; what each command ends is counted against what was begun."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Lifecycle()
        self.prefills_open: list[str] = []
        self.has_slot = False
        self.has_pins = False
        self.closed = 0

    @rule(event=st.sampled_from(EVENTS))
    def happens(self, event: Event) -> None:
        was_open = self.life.state not in ENDS
        before = replace(self.life, story=[])
        try:
            commands = self.life.handle(event)
        except InvalidTransitionError:
            assert replace(self.life, story=[]) == before  # a refused event changes nothing
            return
        if was_open and isinstance(event, PrefillStarted | HedgeStarted):
            self.prefills_open.append(event.worker_id)
            self.has_pins = True
        if was_open and isinstance(event, SlotTaken):
            self.has_slot = True
        for command in commands:
            self._perform(command)
        if not was_open:
            assert not commands

    def _perform(self, command: Command) -> None:
        match command:
            case EndPrefillLoad(worker_id):
                self.prefills_open.remove(worker_id)  # raises for what was not begun
            case FreeSlot():
                assert self.has_slot
                self.has_slot = False
            case ReleasePins():
                assert self.has_pins
                self.has_pins = False
            case CloseRecord():
                self.closed += 1

    @invariant()
    def agrees(self) -> None:
        self.life.check_integrity()
        is_over = self.life.state in ENDS
        legs = [self.life.prefill_worker, self.life.hedge_worker]
        assert sorted(self.prefills_open) == sorted(filter(None, legs))
        assert not (is_over and self.prefills_open)
        assert self.has_slot == bool(self.life.slot_worker)
        assert self.has_pins == self.life.may_have_pins
        assert self.closed == int(is_over)

    def teardown(self) -> None:
        """However far it has come, its client leaves."""
        self.happens(ClientLeft())
        assert self.life.state in ENDS
        self.agrees()


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
