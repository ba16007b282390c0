"""What a request waits for, as its state and times say, and how long that may last."""

from dataclasses import dataclass
from typing import Literal

from controlplane.core.lifecycle import ENDS, State


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds a request may wait in each state; `ends` False: only said, not ended."""

    ends: bool = True
    waiting: float = 120.0
    prefilling: float = 330.0
    handing_over: float = 30.0
    silence: float = 150.0  # to a stream's first or next piece
    reply: float = 3660.0  # of a plain request: the engine answers only at its end

    @property
    def shortest(self) -> float:
        """A younger request cannot be stuck."""
        return min(self.waiting, self.prefilling, self.handing_over, self.silence, self.reply)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request is. Monotonic seconds; 0 = never got there."""

    state: State
    model: str
    slot_worker: str
    prefill_worker: str
    received_at: float
    planned_at: float
    slot_at: float  # that it holds now
    prefill_sent_at: float
    prefill_done_at: float
    decode_sent_at: float
    is_stream: bool
    last_piece_at: float | None  # of a stream that has begun
    client_stalls: bool  # it does not read what it is sent
    is_decoding: bool = False  # a decode leg is in flight
    waits_for_slot: bool = False  # else, without a slot, for its turn at a prefill worker
    slot_asked_at: float = 0.0  # again, after it had one


@dataclass(frozen=True, slots=True)
class Wait:
    """`bound` None: bounded elsewhere (a client that does not read has its own limit)."""

    state: State
    what: str
    since: float
    bound: float | None
    leg: Literal["", "prefill", "decode"] = ""
    worker: str = ""


def judge(place: Place, bounds: Bounds) -> Wait | None:
    """None for a request that has ended."""
    if place.waits_for_slot and place.state not in ENDS:
        what = f"a decode slot of model {place.model}"
        since = place.slot_asked_at or place.planned_at or place.received_at
        return Wait(place.state, what, since, bounds.waiting)
    match place.state:
        case State.WAITING:
            since = place.slot_at or place.planned_at or place.received_at
            return Wait(place.state, "its turn at a prefill worker", since, bounds.waiting)
        case State.PREFILLING:
            worker = place.prefill_worker
            what = f"the prefill leg on worker {worker}"
            if place.is_decoding:
                what += f", for which the decode leg waits on worker {place.slot_worker}"
            since, bound = place.prefill_sent_at, bounds.prefilling
            return Wait(place.state, what, since, bound, "prefill", worker)
        case State.HANDING_OVER:
            legs = place.prefill_done_at, place.prefill_sent_at, place.decode_sent_at
            since = max(*legs, place.slot_at)
            what = f"the decode leg to be sent to worker {place.slot_worker}"
            return Wait(place.state, what, since, bounds.handing_over, "decode", place.slot_worker)
        case State.DECODING:
            return _decoding(place, bounds)
        case _:
            return None


def _decoding(place: Place, bounds: Bounds) -> Wait:
    worker = place.slot_worker
    if place.client_stalls:
        since = place.last_piece_at or place.decode_sent_at
        return Wait(place.state, "the client to read", since, None)
    if not place.is_stream:
        what, since, bound = "the reply", place.decode_sent_at, bounds.reply
    elif place.last_piece_at is None:
        what, since, bound = "the first piece", place.decode_sent_at, bounds.silence
    else:
        what, since, bound = "the next piece", place.last_piece_at, bounds.silence
    what = f"{what} of the decode leg on worker {worker}"
    return Wait(place.state, what, since, bound, "decode", worker)


def is_stuck(wait: Wait, now: float) -> bool:
    return wait.bound is not None and now - wait.since > wait.bound
