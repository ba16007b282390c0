"""Time is counted once, whoever sent the legs: this gateway, or another that tells of its own."""

import pytest

from controlplane.core.prefill_queue import STALE_SECONDS, PrefillQueue, QueueShare


def test_waits_add_up_and_progress_counts() -> None:
    queue = PrefillQueue()
    queue.start("a", 2.0, 1000, now=10.0)
    queue.start("b", 1.0, 500, now=10.5)
    assert queue.wait_seconds(10.5) == pytest.approx(2.5)
    assert queue.wait_seconds(20.0) == pytest.approx(1.0)  # a is late, b still to come
    assert queue.tokens == 1500


def test_service_is_without_the_wait() -> None:
    queue = PrefillQueue()
    queue.start("a", 2.0, 10, now=0.0)
    queue.start("b", 1.0, 10, now=0.0)
    assert queue.end("a", 2.0) == pytest.approx(2.0)
    assert queue.end("b", 3.5) == pytest.approx(1.5)
    assert len(queue) == queue.tokens == 0
    assert queue.wait_seconds(4.0) == 0


class TestSeveralGateways:
    """Two gateways that tell each other at once predict what one with all legs would."""

    def test_a_wait_is_behind_the_legs_of_all(self) -> None:
        one, a, b = PrefillQueue(), PrefillQueue(), PrefillQueue()
        for queue, leg, seconds, at in ((a, "x", 2.0, 0.0), (b, "y", 1.0, 0.5), (a, "z", 0.5, 0.6)):
            queue.start(leg, seconds, 10, at)
            one.start(leg, seconds, 10, at)
        a.take("b", b.share(0.7), 0.7)
        b.take("a", a.share(0.7), 0.7)
        for now in (0.7, 1.0, 1.9):
            expected = pytest.approx(one.wait_seconds(now))
            assert a.wait_seconds(now) == expected
            assert b.wait_seconds(now) == expected
        assert a.num_legs == b.num_legs == 3
        assert len(a) == 2

    def test_what_a_leg_took_begins_where_anothers_ended(self) -> None:
        a, b = PrefillQueue(), PrefillQueue()
        a.start("x", 2.0, 10, now=0.0)
        b.take("a", a.share(0.0), 0.0)
        b.start("y", 1.0, 10, now=0.1)
        a.end("x", 2.0)
        b.take("a", a.share(2.0), 2.01)
        assert b.wait_seconds(2.5) == pytest.approx(0.5, abs=0.02)
        assert b.end("y", 3.0) == pytest.approx(1.0, abs=0.02)
        assert b.is_hearsay
        b.start("z", 1.0, 10, now=3.0)
        b.end("z", 4.0)
        assert not b.is_hearsay

    def test_what_is_told_late_counts_for_nothing(self) -> None:
        a = PrefillQueue()
        a.take("b", QueueShare(3, 30.0, 10.0), now=0.0)
        assert a.wait_seconds(0.0) == 30.0
        assert a.wait_seconds(STALE_SECONDS + 0.1) == 0
        a.expire(STALE_SECONDS + 0.1)
        assert a.num_legs == 0

    def test_one_that_idles_or_leaves_counts_no_more(self) -> None:
        a = PrefillQueue()
        for end in (a.idle, a.forget):
            a.take("b", QueueShare(1, 1.0, 1.0), now=0.0)
            end("b")
            end("b")
            assert a.wait_seconds(0.0) == a.num_legs == 0

    def test_a_leg_behind_one_whose_end_was_not_told_teaches_nothing(self) -> None:
        a, b = PrefillQueue(), PrefillQueue()
        a.start("x", 2.0, 10, now=0.0)
        b.take("a", a.share(0.0), 0.0)
        b.start("y", 1.0, 10, now=0.1)
        b.take("a", a.share(1.9), 1.9)
        assert b.end("y", 3.0) == pytest.approx(2.9)
        assert b.is_vague
        a.end("x", 2.0)
        b.take("a", a.share(2.0), 3.2)
        b.start("z", 1.0, 10, now=3.3)
        assert b.end("z", 4.3) == pytest.approx(1.0)
        assert not b.is_vague
