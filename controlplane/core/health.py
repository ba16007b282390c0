"""Passive health: what the data path itself met. Probes are no proof of service.

ok -> ejected (pause) -> trial (one leg) -> ok, or ejected again for twice as long
"""

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from controlplane.core.suspects import Suspects

FAILURES_TO_EJECT = 3
"""In a row."""
WINDOW = 20
"""Outcomes of a worker that are looked back on."""
MIN_OUTCOMES = 10
FAILED_SHARE = 0.5
"""Of `MIN_OUTCOMES` or more in the window: one that fails every other request is ejected too."""
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
UNANSWERED_SECONDS = 10.0
"""No trial for so long after a probe without an answer: the next probe comes before that."""
TRIAL_SECONDS = 2.0
"""A trial that has said nothing by then makes way for another: a long reply is no verdict."""


MAX_REQUESTS_IN_A_ROW = 16
"""Different ones that are told apart."""

DataPathState = Literal["ok", "ejected", "trial"]
"""`DataPath` as it goes over wires."""


class DataPath(StrEnum):
    """What requests meet at a worker."""

    OK = "ok"
    EJECTED = "ejected"
    TRIAL = "trial"  # its pause is over; one leg at a time shows whether it serves again


@dataclass(frozen=True, slots=True)
class FailedLeg:
    """Of a request that may itself be why. `others`: who else does such work as its worker.
    `answered`: the engine said so, and is there."""

    request: int  # equal for equal ones
    leg: str
    others: Collection[str] = ()
    answered: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one worker; `answers_probe` None: not probed since it last served."""

    state: DataPath = DataPath.OK
    failures: int = 0  # in a row
    error: str = ""
    answers_probe: bool | None = None
    outcomes: int = 0  # looked back on, `WINDOW` at most; 0: no failure among the last ones
    outcomes_failed: int = 0
    pause_seconds: float = 0.0  # until its next trial may go out

    @property
    def note(self) -> str:
        """In words, for consoles; empty where there is nothing to say."""
        if not self.error:
            return ""
        probe = {None: "", True: "probe ok, ", False: "no answer to probes, "}[self.answers_probe]
        return f"{probe}requests failing: {self.error}"


@dataclass(slots=True)
class _Worker:
    failures: int = 0  # in a row
    pauses: int = 0  # since it was last sound for a whole window
    is_open: bool = False
    was_unreachable: bool = False
    open_until: float = 0.0
    trial_until: float = 0.0  # a trial is under way
    error: str = ""
    answers_probe: bool | None = None
    served: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    requests: set[int] = field(default_factory=set)  # that failed in a row
    is_withheld: bool = False  # the first of them says nothing by itself

    def count(self) -> None:
        for _ in range(1 + self.is_withheld):
            self.failures += 1
            self.served.append(False)
        self.is_withheld = False


@dataclass(slots=True)
class DataPathHealth:
    """A worker that fails pauses for 1 s, then twice as long each time, up to 30 s.

    Client errors never come here (I7). Only workers that have failed lately have an entry, so a
    sound cluster costs nothing; entries of workers that left are dropped by `keep`.
    """

    _workers: dict[str, _Worker] = field(default_factory=dict)
    suspects: Suspects = field(default_factory=Suspects)
    is_sound: bool = True  # no worker has failed lately: none is paused

    def is_paused(self, worker_id: str, now: float) -> bool:
        """Ejected, or its one trial is under way."""
        worker = self._workers.get(worker_id)
        if worker is None or not worker.is_open:
            return False
        return now < worker.open_until or now < worker.trial_until

    @property
    def has_ejected(self) -> bool:
        """Whether `overdue` is worth asking."""
        return any(worker.is_open for worker in self._workers.values())

    def overdue(self, worker_id: str, now: float) -> float | None:
        """Seconds for which the worker could have had its trial; None: it is due none."""
        worker = self._workers.get(worker_id)
        if worker is None or not worker.is_open:
            return None
        since = max(worker.open_until, worker.trial_until)
        return None if now < since else now - worker.open_until

    def started(self, worker_id: str, now: float) -> None:
        """A leg goes to the worker: its trial, if it is due one."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.is_open:
            worker.trial_until = now + TRIAL_SECONDS

    def failed(
        self, worker_id: str, now: float, *, unreachable: bool, error: str = "",
        leg: FailedLeg | None = None,
    ) -> None:  # fmt: skip
        """`unreachable` (refused, reset) pauses at once; other failures three in a row, or half.

        What one request meets, repeated or not, counts against one worker, and against no last
        sound one; on others only beside failures of other requests. By answers alone the last sound
        one stays even so. `leg` None: no request can be why.
        """
        worker = self._workers.setdefault(worker_id, _Worker())
        self.is_sound = False
        worker.error = error
        if leg is not None and not self._counts(worker_id, worker, leg, now):
            worker.trial_until = 0.0
            return
        worker.count()
        if now < worker.open_until:
            return  # legs that were under way when it was ejected say nothing new
        fails = worker.failures >= FAILURES_TO_EJECT or _fails_often(worker.served)
        stays = leg is not None and leg.answered and not self._is_replaced_by(leg.others)
        if worker.is_open or unreachable or (fails and not stays):
            pause = FIRST_PAUSE_SECONDS * 2 ** min(worker.pauses, 10)
            worker.open_until = now + min(pause, LONGEST_PAUSE_SECONDS)
            worker.pauses += 1
            worker.is_open, worker.trial_until = True, 0.0
            worker.was_unreachable = unreachable

    def _counts(self, worker_id: str, worker: _Worker, leg: FailedLeg, now: float) -> bool:
        """Whether the leg's failure is evidence against its worker."""
        speaks = self.suspects.failed(leg.request, worker_id, leg.leg, now)
        is_new = leg.request not in worker.requests
        is_alone = not worker.requests - {leg.request}
        if len(worker.requests) < MAX_REQUESTS_IN_A_ROW:
            worker.requests.add(leg.request)
        if is_alone:
            counts = speaks and (worker.is_open or self._is_replaced_by(leg.others))
            worker.is_withheld |= is_new and not counts
            return counts
        return speaks or is_new

    def leg_served(self, request: Hashable, leg: str) -> None:
        """To its end, by some worker: where an equal request's leg failed, its worker was why.
        `request` is hashed only where that matters."""
        if not self.is_sound and len(self.suspects):
            self.suspects.served(hash(request), leg)

    def _is_replaced_by(self, others: Collection[str]) -> bool:
        known = (self._workers.get(name) for name in others)
        return any(one is None or not (one.is_open or one.failures) for one in known)

    def served(self, worker_id: str) -> None:
        """A leg was answered as it should be."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if worker.is_open:  # the trial went well: what was before counts no longer
            worker.is_open = False
            worker.open_until = worker.trial_until = 0.0
            worker.served.clear()
        worker.failures, worker.is_withheld = 0, False
        worker.requests.clear()
        worker.served.append(True)
        if len(worker.served) == WINDOW and all(worker.served):
            del self._workers[worker_id]
            self.is_sound = not self._workers

    def no_verdict(self, worker_id: str) -> None:
        """A leg ended by its client's doing: another may be the trial."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.trial_until = 0.0

    def probed(self, worker_id: str, now: float, *, answers: bool) -> None:
        """A probe of an ejected worker. One that could not be reached and now answers gets its
        trial at once; one whose requests fail although it answers waits for its time."""
        worker = self._workers.get(worker_id)
        if worker is None or not worker.is_open:
            return
        worker.answers_probe = answers
        if worker.was_unreachable and answers:
            worker.open_until = min(worker.open_until, now)
        elif not answers:
            worker.open_until = max(worker.open_until, now + UNANSWERED_SECONDS)

    def keep(self, worker_ids: set[str]) -> None:
        for gone in self._workers.keys() - worker_ids:
            del self._workers[gone]
        self.is_sound = not self._workers

    def paused(self, now: float) -> list[str]:
        return [name for name in self._workers if self.is_paused(name, now)]

    def ejected(self) -> list[str]:
        """Those that have to show that they serve again, paused or not."""
        return [name for name, worker in self._workers.items() if worker.is_open]

    def verdict(self, worker_id: str, now: float) -> Verdict:
        worker = self._workers.get(worker_id)
        if worker is None:
            return Verdict()
        state = DataPath.OK
        if worker.is_open:
            state = DataPath.EJECTED if now < worker.open_until else DataPath.TRIAL
        failing = worker.is_open or worker.failures > 0
        error = worker.error if failing else ""
        return Verdict(
            state,
            worker.failures,
            error,
            worker.answers_probe if failing else None,
            len(worker.served),
            worker.served.count(False),
            max(0.0, worker.open_until - now) if worker.is_open else 0.0,
        )


def _fails_often(served: deque[bool]) -> bool:
    return len(served) >= MIN_OUTCOMES and served.count(False) >= FAILED_SHARE * len(served)
