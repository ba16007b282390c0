"""Requests that fail on several workers: suspected, cleared, forgotten, bounded."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.suspects import MAX_REQUESTS, REMEMBERED_SECONDS, Suspects


def test_what_fails_at_two_workers_says_nothing_of_either() -> None:
    suspects = Suspects()
    assert suspects.failed(1, "d1", "decode", 0.0)
    assert suspects.failed(1, "d1", "decode", 1.0)
    assert not suspects.failed(1, "d2", "decode", 2.0)
    assert not suspects.failed(1, "d1", "decode", 3.0)
    assert suspects.failed(2, "d2", "decode", 4.0)


def test_only_the_leg_that_failed_clears_it() -> None:
    suspects = Suspects()
    suspects.failed(1, "p1", "prefill", 0.0)
    suspects.failed(1, "d1", "decode", 0.0)
    suspects.served(1, "decode")
    assert suspects.failed(1, "p1", "prefill", 0.0)
    suspects.served(1, "decode")
    assert not suspects.failed(1, "p2", "prefill", 0.0)
    suspects.served(1, "prefill")
    assert len(suspects) == 0
    suspects.served(1, "prefill")


def test_it_is_forgotten_when_it_has_not_failed_for_long() -> None:
    suspects = Suspects()
    suspects.failed(1, "d1", "decode", 0.0)
    assert not suspects.failed(1, "d2", "decode", REMEMBERED_SECONDS)
    assert not suspects.failed(1, "d3", "decode", 2 * REMEMBERED_SECONDS)
    assert suspects.failed(1, "d2", "decode", 3 * REMEMBERED_SECONDS + 1)
    suspects.failed(2, "d2", "decode", 5 * REMEMBERED_SECONDS)
    assert len(suspects) == 1


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 30), st.booleans()), max_size=300))
def test_what_is_remembered_is_bounded(events: list[tuple[int, int, bool]]) -> None:
    suspects = Suspects()
    for request in range(MAX_REQUESTS):
        suspects.failed(-request, "d", "decode", 0.0)
    for request, worker, fails in events:
        if fails:
            suspects.failed(request, f"d{worker}", "decode", 1.0)
        else:
            suspects.served(request, "decode")
        suspects.check_integrity()
