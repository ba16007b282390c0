"""Decisions about one process, without a process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.core.liveness import Sign
from workers.core.supervision import (
    ALIVE,
    PATIENCE,
    START_PATIENCE,
    Command,
    DrainRequested,
    Event,
    Exited,
    Limits,
    ProbeFailed,
    ProbeSucceeded,
    ProcessState,
    Progressed,
    RestartRequested,
    ResumeRequested,
    StartRequested,
    StopRequested,
    SupervisedProcess,
    Ticked,
    backoff_seconds,
)

CRASH = Exited("exit status 1: boom")


def ready(now: float = 0.0) -> SupervisedProcess:
    process = SupervisedProcess(Limits())
    assert process.handle(StartRequested(), now) == [Command.SPAWN]
    assert process.handle(ProbeSucceeded(), now) == []
    assert process.state is ProcessState.READY
    return process


class TestStart:
    def test_start_spawns_once(self) -> None:
        process = SupervisedProcess(Limits())
        assert process.handle(StartRequested(), 0) == [Command.SPAWN]
        assert process.handle(StartRequested(), 1) == []

    def test_loading_is_seen_between_launch_and_ready(self) -> None:
        process = SupervisedProcess(Limits())
        process.handle(StartRequested(), 0)
        process.handle(Progressed(), 1)
        assert process.state is ProcessState.LOADING
        process.handle(ProbeSucceeded(), 2)
        process.handle(Progressed(), 3)
        assert process.state is ProcessState.READY

    def test_a_start_that_takes_too_long_is_killed_and_says_so(self) -> None:
        process = SupervisedProcess(Limits(start_seconds=5))
        process.handle(StartRequested(), 0)
        assert process.handle(Ticked(), 4.9) == []
        assert process.handle(Ticked(), 5) == [Command.KILL]
        process.handle(Exited("killed by SIGKILL"), 5.1)
        assert process.state is ProcessState.FAILED
        assert process.last_error == "not ready within 5 s"


class TestRestart:
    def test_backoff_doubles_up_to_its_bound(self) -> None:
        pauses = [backoff_seconds(failures) for failures in range(1, 9)]
        assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]

    def test_a_crash_starts_it_again_after_the_backoff(self) -> None:
        process = ready()
        process.handle(CRASH, 10)
        assert (process.state, process.last_error) == (ProcessState.FAILED, CRASH.error)
        assert process.handle(Ticked(), 10.9) == []
        assert process.handle(Ticked(), 11) == [Command.SPAWN]
        assert process.restarts == 1

    def test_it_is_never_given_up(self) -> None:
        process, now = ready(), 0.0
        for _ in range(50):
            process.handle(CRASH, now)
            now += 30
            assert process.handle(Ticked(), now) == [Command.SPAWN]
        assert process.restarts == 50

    def test_a_minute_of_service_forgives_earlier_failures(self) -> None:
        process = ready()
        for now in (1, 3):
            process.handle(CRASH, now)
            process.handle(Ticked(), now + 2)
            process.handle(ProbeSucceeded(), now + 2)
        assert process.failures == 2
        process.handle(CRASH, 5 + 60)
        assert process.failures == 1

    def test_an_operators_restart_drains_first_and_counts_no_failure(self) -> None:
        process = ready()
        assert process.handle(RestartRequested(), 10) == []
        assert process.state is ProcessState.DRAINING
        assert process.handle(Ticked(), 12) == [Command.TERMINATE]
        assert process.handle(Exited("exit status 0"), 13) == [Command.SPAWN]
        assert (process.restarts, process.failures, process.last_error) == (1, 0, "")

    def test_an_operators_restart_skips_the_backoff(self) -> None:
        process = ready()
        process.handle(CRASH, 10)
        assert process.handle(RestartRequested(), 10.1) == [Command.SPAWN]


def unanswered(
    process: SupervisedProcess, sign: Sign, start: float, seconds: float
) -> float | None:
    """Probes every two seconds, in vain; when it is killed."""
    now = start
    while now < start + seconds:
        now += 2
        process.handle(Ticked(), now - 1)
        if process.handle(ProbeFailed(sign), now) == [Command.KILL]:
            return now - start
    return None


class TestHang:
    @pytest.mark.parametrize("sign", [Sign.STILL, Sign.STOPPED])
    def test_one_that_does_nothing_is_killed_within_the_bound(self, sign: Sign) -> None:
        process = ready()
        process.handle(ProbeSucceeded(), 50)
        assert unanswered(process, sign, 50, 600) == 60
        process.handle(Exited("killed by SIGKILL"), 110)
        assert process.last_error == f"no answer to health probes for 60 s: {sign.value}"

    @pytest.mark.parametrize("sign", [Sign.BUSY, Sign.STARVED])
    def test_one_that_works_or_is_kept_from_it_has_time_but_not_for_ever(self, sign: Sign) -> None:
        process = ready()
        assert unanswered(process, sign, 0, 200) is None
        assert sign.value in process.note
        assert process.note.endswith("killed in 100 s if that stays so")
        process.handle(ProbeSucceeded(), 201)
        assert process.note == ""
        assert unanswered(process, sign, 201, 600) == 60 * PATIENCE

    def test_only_the_time_in_which_nothing_was_done_counts(self) -> None:
        process = ready()
        assert unanswered(process, Sign.STILL, 0, 40) is None
        assert unanswered(process, Sign.STARVED, 40, 100) is None
        assert unanswered(process, Sign.STILL, 140, 60) == 20

    def test_a_supervisor_that_slept_blames_nobody_for_it(self) -> None:
        process = ready()
        process.handle(ProbeSucceeded(), 10)
        assert process.handle(Ticked(), 1000) == []
        assert process.handle(ProbeFailed(Sign.STILL), 1000) == []
        assert process.silent_seconds < 10

    def test_a_start_that_others_hold_up_takes_longer_within_a_bound(self) -> None:
        for sign, seconds in (
            (Sign.BUSY, 60),
            (Sign.STILL, 60),
            (Sign.STARVED, 60 * START_PATIENCE),
        ):
            process, now = SupervisedProcess(Limits()), 0.0
            process.handle(StartRequested(), 0)
            while process.handle(Ticked(), now) == []:
                process.handle(ProbeFailed(sign), now)
                now += 0.5
            assert now == seconds
            process.handle(Exited("killed by SIGKILL"), now)
            assert process.last_error.startswith(f"not ready within {seconds} s")

    def test_a_silence_is_told_only_when_it_lasts(self) -> None:
        process = ready()
        unanswered(process, Sign.STILL, 0, 6)
        assert process.note == ""
        unanswered(process, Sign.STILL, 6, 6)
        assert (
            process.note == "no answer for 12 s: it does nothing; killed in 48 s if that stays so"
        )


class TestDrain:
    def test_drain_and_resume(self) -> None:
        process = ready()
        process.handle(DrainRequested(), 1)
        assert process.state is ProcessState.DRAINING
        process.handle(Ticked(), 50)
        assert process.state is ProcessState.DRAINING
        process.handle(ResumeRequested(), 51)
        assert process.state is ProcessState.READY

    def test_a_drained_process_that_crashed_comes_back_drained(self) -> None:
        process = ready()
        process.handle(DrainRequested(), 1)
        process.handle(CRASH, 2)
        process.handle(Ticked(), 3)
        process.handle(ProbeSucceeded(), 4)
        assert process.state is ProcessState.DRAINING


class TestStop:
    def test_stop_terminates_then_kills(self) -> None:
        process = ready()
        assert process.handle(StopRequested(), 1) == [Command.TERMINATE]
        assert process.handle(Ticked(), 11) == [Command.KILL]
        process.handle(Exited("killed by SIGKILL"), 11.1)
        assert process.state is ProcessState.STOPPED
        assert process.handle(Ticked(), 100) == []

    def test_what_does_not_run_is_stopped_at_once(self) -> None:
        process = ready()
        process.handle(CRASH, 1)
        assert process.handle(StopRequested(), 1.5) == []
        assert process.state is ProcessState.STOPPED

    def test_stop_wins_over_a_restart(self) -> None:
        process = ready()
        process.handle(RestartRequested(), 1)
        process.handle(StopRequested(), 1.5)
        process.handle(Exited("exit status 0"), 2)
        assert process.state is ProcessState.STOPPED


EVENTS: list[Event] = [
    StartRequested(), Progressed(), ProbeSucceeded(), CRASH, RestartRequested(),
    DrainRequested(), ResumeRequested(), StopRequested(), Ticked(),
    ProbeFailed(Sign.STILL), ProbeFailed(Sign.STARVED),
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 40)), max_size=60))
def test_any_history_keeps_the_invariants(history: list[tuple[Event, float]]) -> None:
    """The shell is simulated: a process exists between SPAWN and its Exited."""
    process, now, exists = SupervisedProcess(Limits()), 0.0, False
    for event, seconds in history:
        now += seconds
        if isinstance(event, Exited | ProbeSucceeded | ProbeFailed | Progressed) and not exists:
            continue
        exists = exists and not isinstance(event, Exited)
        for command in process.handle(event, now):
            if command is Command.SPAWN:
                assert not exists, "two processes at once"
                exists = True
            else:
                assert exists, "a signal to nobody"
        process.check_integrity()
        assert exists == (process.state in ALIVE)
