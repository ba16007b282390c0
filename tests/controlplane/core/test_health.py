"""Passive health: unreachable pauses at once, other failures after three; trials back off."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.health import (
    LONGEST_PAUSE_SECONDS,
    TRIAL_SECONDS,
    WINDOW,
    DataPath,
    DataPathHealth,
    FailedLeg,
)


def test_unreachable_pauses_at_once_and_comes_back() -> None:
    health = DataPathHealth()
    health.failed("d1", 100.0, unreachable=True)
    assert health.is_paused("d1", 100.5)
    assert not health.is_paused("d1", 101.1)
    health.failed("d1", 101.1, unreachable=True)
    assert health.is_paused("d1", 103.0)  # twice as long
    health.served("d1")
    assert not health.is_paused("d1", 101.2)
    assert health.paused(101.2) == []


def test_answers_with_errors_pause_after_three_in_a_row() -> None:
    health = DataPathHealth()
    for _ in range(2):
        health.failed("d1", 1.0, unreachable=False)
        assert not health.is_paused("d1", 1.0)
    health.failed("d1", 1.0, unreachable=False)
    assert health.is_paused("d1", 1.0)


def failed_leg(request: int, *others: str, answered: bool = False) -> FailedLeg:
    return FailedLeg(request, "decode", others, answered)


def test_by_answers_alone_nobody_is_ejected_whom_no_sound_one_could_replace() -> None:
    health = DataPathHealth()

    def answered(worker: str, request: int, *others: str) -> None:
        leg = failed_leg(request, *others, answered=True)
        health.failed(worker, float(request), unreachable=False, leg=leg)

    for request in range(5):
        answered("d1", request, *(["d2"] if request else ["d2", "d3"]))
        answered("d2", request + 100, "d1")
    assert health.ejected() == []
    answered("d1", 5)
    assert health.ejected() == []
    health.served("d2")
    answered("d1", 6, "d2")
    assert health.ejected() == ["d1"]
    health.failed("d2", 7.0, unreachable=True)
    assert health.ejected() == ["d1", "d2"]  # nobody there at all


WORKERS = ("d1", "d2", "d3")


def poison(health: DataPathHealth, request: int, now: float, *, unreachable: bool) -> None:
    """A request fails wherever it is tried."""
    for name in WORKERS:
        if not health.is_paused(name, now):
            health.started(name, now)
            leg = failed_leg(request, *(other for other in WORKERS if other != name))
            health.failed(name, now, unreachable=unreachable, leg=leg)


@pytest.mark.parametrize("unreachable", [True, False])
def test_a_request_that_breaks_every_worker_ejects_one_at_most(unreachable: bool) -> None:
    health = DataPathHealth()
    for second in range(200):
        poison(health, 7, float(second), unreachable=unreachable)
        assert len(health.ejected()) <= 1
        assert sum(health.is_paused(name, second + 0.1) for name in WORKERS) <= 1
    for name in WORKERS:
        health.served(name)
    assert health.ejected() == []


def test_failures_of_another_request_bring_back_what_was_withheld() -> None:
    health = DataPathHealth()
    poison(health, 7, 0.0, unreachable=False)
    for request in (8, 9):
        health.failed("d2", 1.0, unreachable=False, leg=failed_leg(request, "d1", "d3"))
    assert health.ejected() == ["d2"]
    health.failed("d3", 2.0, unreachable=True, leg=failed_leg(10, "d1"))
    assert health.ejected() == ["d2", "d3"]


def test_beside_failures_of_others_a_suspect_counts_once() -> None:
    health = DataPathHealth()
    health.failed("d1", 0.0, unreachable=False, leg=failed_leg(1, "d2", "d3"))
    for _ in range(5):
        health.failed("d2", 0.0, unreachable=False, leg=failed_leg(7, "d1", "d3"))
        health.failed("d1", 0.0, unreachable=False, leg=failed_leg(7, "d2", "d3"))
    assert health.verdict("d1", 0.0).failures == 2
    assert health.verdict("d2", 0.0).failures == 1


def test_a_request_that_some_worker_serves_is_no_suspect() -> None:
    """Three that break, one that serves: each time the same request is asked."""
    health = DataPathHealth()
    for now in range(20):
        for name in WORKERS:
            if not health.is_paused(name, now):
                health.failed(name, now, unreachable=True, leg=failed_leg(7, "d4"))
        health.suspects.served(7, "decode")
    assert sorted(health.ejected()) == list(WORKERS)


def test_one_request_ejects_no_last_sound_worker() -> None:
    health = DataPathHealth()
    for now in range(10):
        health.failed("d1", now, unreachable=True, leg=failed_leg(7))
    assert health.ejected() == []
    health.failed("d1", 10.0, unreachable=True, leg=failed_leg(8))
    assert health.ejected() == ["d1"]


def test_one_that_fails_every_other_request_is_ejected_too() -> None:
    health = DataPathHealth()
    for _ in range(4):
        health.failed("d1", 1.0, unreachable=False)
        health.served("d1")
    health.failed("d1", 1.0, unreachable=False)
    assert not health.is_paused("d1", 1.0)
    health.served("d1")
    health.failed("d1", 1.0, unreachable=False)
    assert health.is_paused("d1", 1.0)


def test_after_its_pause_one_leg_at_a_time_is_its_trial() -> None:
    health = DataPathHealth()
    health.failed("d1", 0.0, unreachable=True)
    assert not health.is_paused("d1", 1.5)
    assert health.overdue("d1", 0.5) is None
    assert health.overdue("d1", 1.5) == 0.5
    health.started("d1", 1.5)
    assert health.overdue("d1", 1.6) is None
    assert health.is_paused("d1", 1.6)  # others wait for what the trial shows
    assert health.verdict("d1", 1.6).state is DataPath.TRIAL
    health.no_verdict("d1")  # its client left
    assert not health.is_paused("d1", 1.7)
    health.started("d1", 1.7)
    assert not health.is_paused("d1", 1.8 + TRIAL_SECONDS)  # a trial lost is no lock
    health.served("d1")
    assert not health.is_paused("d1", 1.8)
    assert health.verdict("d1", 1.8).state is DataPath.OK


def test_legs_that_were_under_way_do_not_lengthen_the_pause() -> None:
    health = DataPathHealth()
    for _ in range(16):
        health.failed("d1", 5.0, unreachable=True)
    assert not health.is_paused("d1", 6.1)


def test_pauses_are_bounded_and_entries_leave_with_their_workers() -> None:
    health = DataPathHealth()
    for i in range(30):
        health.failed("d1", i * 40.0, unreachable=True)
    assert not health.is_paused("d1", 29 * 40 + LONGEST_PAUSE_SECONDS + 0.1)
    health.keep(set())
    assert health.paused(0.0) == []
    assert health.ejected() == []


def test_an_entry_goes_when_a_whole_window_was_served() -> None:
    health = DataPathHealth()
    health.failed("d1", 0.0, unreachable=False)
    for _ in range(WINDOW):
        health.served("d1")
    assert health._workers == {}


def test_a49_probe_ok_and_requests_failing_is_said() -> None:
    health = DataPathHealth()
    for _ in range(3):
        health.failed("d1", 0.0, unreachable=False, error="answered 502: bad")
    health.probed("d1", 0.1, answers=True)
    assert health.is_paused("d1", 0.5)  # a probe is no proof of service
    verdict = health.verdict("d1", 0.5)
    assert verdict.state is DataPath.EJECTED
    assert verdict.note == "probe ok, requests failing: answered 502: bad"


def test_one_that_could_not_be_reached_gets_its_trial_when_it_answers_again() -> None:
    health = DataPathHealth()
    for i in range(6):
        health.failed("d1", i * 40.0, unreachable=True, error="refused")
    assert health.is_paused("d1", 210.0)
    health.probed("d1", 210.0, answers=False)
    assert health.verdict("d1", 210.0).note == "no answer to probes, requests failing: refused"
    assert health.is_paused("d1", 215.0)  # no trial while probes go unanswered
    health.probed("d1", 211.0, answers=True)
    assert not health.is_paused("d1", 211.1)


@given(st.lists(st.tuples(st.sampled_from(["fail", "cut", "serve", "start", "none", "probe"]),
                          st.floats(0.0, 40.0)), max_size=80))  # fmt: skip
def test_nobody_is_paused_for_ever(events: list[tuple[str, float]]) -> None:
    health, now = DataPathHealth(), 0.0
    for event, seconds in events:
        now += seconds
        match event:
            case "fail" | "cut":
                health.failed("d1", now, unreachable=event == "cut")
            case "serve":
                health.served("d1")
                assert not health.is_paused("d1", now)
            case "start":
                health.started("d1", now)
            case "none":
                health.no_verdict("d1")
            case "probe":
                health.probed("d1", now, answers=seconds > 20)
    longest = max(LONGEST_PAUSE_SECONDS, TRIAL_SECONDS)
    assert not health.is_paused("d1", now + longest + 0.1)
