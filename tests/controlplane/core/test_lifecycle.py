"""Whatever happens to a request, what it held is released exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.lifecycle import (
    ENDS,
    ClientLeft,
    CloseRecord,
    DecodeRetried,
    DecodeStarted,
    EndPrefillLoad,
    Failed,
    Finished,
    FreeSlot,
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
)  # fmt: skip


def test_the_usual_walk() -> None:
    life = Lifecycle()
    assert life.handle(SlotTaken("d1")) == []
    assert life.handle(PrefillStarted("p1")) == []
    assert life.handle(PrefillEnded()) == [EndPrefillLoad("p1")]
    assert life.handle(DecodeStarted()) == []
    assert life.handle(Finished()) == [FreeSlot("d1"), ReleasePins(), CloseRecord(State.DONE)]
    assert life.handle(ClientLeft()) == []
    assert life.handle(Failed()) == []


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


@settings(max_examples=300)
@given(st.lists(st.sampled_from(EVENTS), max_size=25), st.sampled_from([Failed(), ClientLeft()]))
def test_every_exit_releases_exactly_once(events: list, last: Failed | ClientLeft) -> None:
    life = Lifecycle()
    commands, prefills, slots = [], 0, 0
    for event in [*events, last]:
        was_open = life.state not in ENDS
        try:
            done = life.handle(event)
        except InvalidTransitionError:
            continue
        commands += done
        if was_open:
            prefills += isinstance(event, PrefillStarted)
            slots += isinstance(event, SlotTaken)
        life.check_integrity()
    assert life.state in ENDS
    assert sum(isinstance(c, EndPrefillLoad) for c in commands) == prefills
    assert sum(isinstance(c, FreeSlot) for c in commands) == min(slots, 1)
    assert sum(isinstance(c, ReleasePins) for c in commands) == min(prefills, 1)
    assert sum(isinstance(c, CloseRecord) for c in commands) == 1
