"""Passive health: unreachable pauses at once, other failures after three; trials back off."""

from controlplane.core.health import DataPathHealth


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


def test_pauses_are_bounded_and_entries_leave_with_their_workers() -> None:
    health = DataPathHealth()
    for i in range(30):
        health.failed("d1", float(i), unreachable=True)
    assert not health.is_paused("d1", 29.0 + 30.1)
    health.keep(set())
    assert health.paused(0.0) == []
