"""One request's life as a state machine: events in, commands out; every exit releases once.

waiting -> prefilling -> handing_over -> decoding -> done
   |           |              |             |
   +-----------+--------------+-------------+--> failed | cancelled      (waiting -> rejected)

Leg 2 may be sent while leg 1 runs (connectors whose legs meet): the request is `prefilling` until
leg 1 is over, and goes on to `decoding` without a handover. A second leg 1 may run beside the first
(a hedge), until one of them is over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, get_args

import msgspec


class State(StrEnum):
    """Where a request is; the last four are ends."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    HANDING_OVER = "handing_over"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


ENDS = frozenset({State.DONE, State.FAILED, State.CANCELLED, State.REJECTED})


# --- events ---


class Rejected(msgspec.Struct, frozen=True, gc=False):
    """Admission said no."""


class SlotTaken(msgspec.Struct, frozen=True, gc=False):
    """The request holds a decode slot of this worker (again after a move)."""

    worker_id: str


class PrefillStarted(msgspec.Struct, frozen=True, gc=False):
    """Leg 1 goes to this worker."""

    worker_id: str


class PrefillEnded(msgspec.Struct, frozen=True, gc=False):
    """Leg 1 is over: served, or failed with another try or decode-side prefill to follow."""


class HedgeStarted(msgspec.Struct, frozen=True, gc=False):
    """A second leg 1 goes to this worker; the first one runs on."""

    worker_id: str


class HedgeEnded(msgspec.Struct, frozen=True, gc=False):
    """Of two legs 1 this worker's is over, and the other one goes on."""

    worker_id: str


class DecodeStarted(msgspec.Struct, frozen=True, gc=False):
    """Leg 2 goes out."""


class DecodeRetried(msgspec.Struct, frozen=True, gc=False):
    """Leg 2 failed before its first byte; it will be tried elsewhere."""


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The answer is complete."""


class Failed(msgspec.Struct, frozen=True, gc=False):
    """No answer, or a broken one."""


class ClientLeft(msgspec.Struct, frozen=True, gc=False):
    """The client closed its connection."""


Event = (
    Rejected
    | SlotTaken
    | PrefillStarted
    | PrefillEnded
    | HedgeStarted
    | HedgeEnded
    | DecodeStarted
    | DecodeRetried
    | Finished
    | Failed
    | ClientLeft
)


# --- commands ---


class EndPrefillLoad(msgspec.Struct, frozen=True, gc=False):
    """The leg no longer counts in the worker's queue."""

    worker_id: str


class FreeSlot(msgspec.Struct, frozen=True, gc=False):
    """Give the decode slot back."""

    worker_id: str


class ReleasePins(msgspec.Struct, frozen=True, gc=False):
    """Tell the agents that the transfer's pins may end."""


class CloseRecord(msgspec.Struct, frozen=True, gc=False):
    """The decision record is complete but for late leg reports."""

    state: State


Command = EndPrefillLoad | FreeSlot | ReleasePins | CloseRecord
_NOTHING: Final[tuple[Command, ...]] = ()


class InvalidTransitionError(AssertionError):
    """An event that cannot happen in this state; carries the story."""


@dataclass(slots=True)
class Lifecycle:
    """What one request holds. `handle` is the one door in."""

    state: State = State.WAITING
    slot_worker: str = ""
    prefill_worker: str = ""  # of the leg 1 in flight
    hedge_worker: str = ""  # of a second one beside it
    is_decoding: bool = False  # a leg 2 is in flight
    may_have_pins: bool = False
    story: list[Event] = field(default_factory=list)

    def handle(self, event: Event) -> Sequence[Command]:
        """Commands in the order to perform them. Raises `InvalidTransitionError`."""
        self.story.append(event)
        return _HANDLERS[type(event)](self, event)

    def _slot_taken(self, event: SlotTaken) -> Sequence[Command]:
        if self.state in ENDS or self.is_decoding:
            raise self._invalid(event)
        self.slot_worker = event.worker_id
        return _NOTHING

    def _prefill_started(self, event: PrefillStarted) -> Sequence[Command]:
        if self.state in ENDS or self.prefill_worker:
            raise self._invalid(event)
        self.state, self.prefill_worker = State.PREFILLING, event.worker_id
        self.may_have_pins = True
        return _NOTHING

    def _prefill_ended(self, event: PrefillEnded) -> Sequence[Command]:
        if self.state in ENDS or not self.prefill_worker:
            raise self._invalid(event)
        self.state = State.DECODING if self.is_decoding else State.HANDING_OVER
        return self._end_prefill()

    def _hedge_started(self, event: HedgeStarted) -> Sequence[Command]:
        is_free = self.prefill_worker not in ("", event.worker_id) and not self.hedge_worker
        if not is_free or self.is_decoding:
            raise self._invalid(event)
        self.hedge_worker = event.worker_id
        return _NOTHING

    def _hedge_ended(self, event: HedgeEnded) -> Sequence[Command]:
        if not self.hedge_worker or event.worker_id not in (self.prefill_worker, self.hedge_worker):
            raise self._invalid(event)
        if event.worker_id == self.prefill_worker:
            self.prefill_worker = self.hedge_worker
        self.hedge_worker = ""
        return [EndPrefillLoad(event.worker_id)]

    def _decode_started(self, event: DecodeStarted) -> Sequence[Command]:
        is_free = bool(self.slot_worker) and not self.hedge_worker
        if self.state in ENDS or not is_free or self.is_decoding:
            raise self._invalid(event)
        self.is_decoding = True
        if not self.prefill_worker:
            self.state = State.DECODING
        return _NOTHING

    def _decode_retried(self, event: DecodeRetried) -> Sequence[Command]:
        if self.state in ENDS or not self.is_decoding:
            raise self._invalid(event)
        self.is_decoding = False
        if not self.prefill_worker:
            self.state = State.HANDING_OVER
        return _NOTHING

    def _rejected(self, event: Rejected) -> Sequence[Command]:
        if self.state is not State.WAITING or self.slot_worker:
            raise self._invalid(event)
        return self._end(State.REJECTED)

    def _finished(self, event: Finished) -> Sequence[Command]:
        if self.state is not State.DECODING:
            raise self._invalid(event)
        return self._end(State.DONE)

    def _failed(self, _: Failed) -> Sequence[Command]:
        return _NOTHING if self.state in ENDS else self._end(State.FAILED)

    def _client_left(self, _: ClientLeft) -> Sequence[Command]:
        return _NOTHING if self.state in ENDS else self._end(State.CANCELLED)

    def check_integrity(self) -> None:
        """An ended request holds nothing; the state says which leg is in flight."""
        if self.state in ENDS:
            assert not self.slot_worker, self.story
            assert not self.prefill_worker, self.story
            assert not self.hedge_worker, self.story
            assert not self.is_decoding, self.story
            assert not self.may_have_pins, self.story
            return
        assert bool(self.prefill_worker) == (self.state is State.PREFILLING), self.story
        assert self.is_decoding or self.state is not State.DECODING, self.story
        assert self.slot_worker or not self.is_decoding, self.story
        assert not self.hedge_worker or (self.prefill_worker and not self.is_decoding), self.story
        assert self.hedge_worker != self.prefill_worker or not self.hedge_worker, self.story

    def _end(self, state: State) -> Sequence[Command]:
        commands = self._end_prefill()
        if self.slot_worker:
            commands.append(FreeSlot(self.slot_worker))
            self.slot_worker = ""
        if self.may_have_pins:
            commands.append(ReleasePins())
            self.may_have_pins = False
        self.state, self.is_decoding = state, False
        commands.append(CloseRecord(state))
        return commands

    def _end_prefill(self) -> list[Command]:
        if not self.prefill_worker:
            return []
        worker_id, self.prefill_worker = self.prefill_worker, ""
        ended: list[Command] = [EndPrefillLoad(worker_id)]
        if self.hedge_worker:
            ended.append(EndPrefillLoad(self.hedge_worker))
            self.hedge_worker = ""
        return ended

    def _invalid(self, event: Event) -> InvalidTransitionError:
        story = " > ".join(type(event).__name__ for event in self.story)
        return InvalidTransitionError(f"{event} in {self.state}: {story}")


_HANDLERS: Final[Mapping[type, Callable[[Lifecycle, Any], Sequence[Command]]]] = {
    Rejected: Lifecycle._rejected,
    SlotTaken: Lifecycle._slot_taken,
    PrefillStarted: Lifecycle._prefill_started,
    PrefillEnded: Lifecycle._prefill_ended,
    HedgeStarted: Lifecycle._hedge_started,
    HedgeEnded: Lifecycle._hedge_ended,
    DecodeStarted: Lifecycle._decode_started,
    DecodeRetried: Lifecycle._decode_retried,
    Finished: Lifecycle._finished,
    Failed: Lifecycle._failed,
    ClientLeft: Lifecycle._client_left,
}
assert set(_HANDLERS) == set(get_args(Event)), "an event without a handler"
