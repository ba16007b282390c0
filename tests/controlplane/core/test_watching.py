"""Each state has a wait with a name, a beginning and a bound; an end has none."""

from dataclasses import replace

import pytest

from controlplane.core.lifecycle import ENDS, State
from controlplane.core.watching import Bounds, Place, is_stuck, judge

BOUNDS = Bounds(waiting=1, prefilling=2, handing_over=3, silence=4, reply=5)
PLACE = Place(
    state=State.WAITING, model="tiny", slot_worker="", prefill_worker="", received_at=1.0,
    planned_at=2.0, slot_at=0.0, prefill_sent_at=0.0, prefill_done_at=0.0, decode_sent_at=0.0,
    is_stream=True, last_piece_at=None, client_stalls=False,
)  # fmt: skip
DECODING = replace(
    PLACE, state=State.DECODING, slot_worker="d1", slot_at=3.0, decode_sent_at=8.0,
)  # fmt: skip


@pytest.mark.parametrize(("place", "words", "since", "bound"), [
    (PLACE, "its turn at a prefill worker", 2.0, 1),
    (replace(PLACE, waits_for_slot=True), "a decode slot of model tiny", 2.0, 1),
    (replace(PLACE, slot_worker="d1", slot_at=3.0), "its turn at a prefill worker", 3.0, 1),
    (replace(PLACE, state=State.PREFILLING, prefill_worker="p1", prefill_sent_at=5.0),
     "the prefill leg on worker p1", 5.0, 2),
    (replace(PLACE, state=State.HANDING_OVER, slot_worker="d1", prefill_done_at=7.0),
     "the decode leg to be sent to worker d1", 7.0, 3),
    (replace(PLACE, state=State.HANDING_OVER, slot_worker="d1", decode_sent_at=7.0, slot_at=9.0),
     "the decode leg to be sent to worker d1", 9.0, 3),
    (replace(PLACE, state=State.HANDING_OVER, slot_worker="d1", decode_sent_at=7.0,
             waits_for_slot=True, slot_asked_at=8.0), "a decode slot of model tiny", 8.0, 1),
    (DECODING, "the first piece of the decode leg on worker d1", 8.0, 4),
    (replace(DECODING, last_piece_at=9.0), "the next piece of the decode leg on worker d1", 9.0, 4),
    (replace(DECODING, is_stream=False), "the reply of the decode leg on worker d1", 8.0, 5),
    (replace(DECODING, last_piece_at=9.0, client_stalls=True), "the client to read", 9.0, None),
])  # fmt: skip
def test_what_it_waits_for(place: Place, words: str, since: float, bound: float | None) -> None:
    wait = judge(place, BOUNDS)
    assert wait is not None
    assert (wait.what, wait.since, wait.bound) == (words, since, bound)
    assert is_stuck(wait, since + 5.1) == (bound is not None)
    assert not is_stuck(wait, since + 0.5)


@pytest.mark.parametrize("state", sorted(ENDS))
def test_an_end_waits_for_nothing(state: State) -> None:
    assert judge(replace(PLACE, state=state), BOUNDS) is None


def test_nothing_is_stuck_before_the_shortest_bound() -> None:
    assert BOUNDS.shortest == 1
