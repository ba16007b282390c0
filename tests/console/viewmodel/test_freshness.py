"""LIVE only while the newest sample is young."""

from __future__ import annotations

import pytest

from console.viewmodel.freshness import freshness


@pytest.mark.parametrize(
    ("age", "mark"), [(0.4, "live"), (1.9, "live"), (2.0, "late"), (9.9, "late"), (10.0, "stale")]
)
def test_marks_by_age(age: float, mark: str) -> None:
    assert freshness(now=100 + age, received=100.0).mark == mark


def test_stale_says_when_it_tries_again() -> None:
    seen = freshness(now=114.0, received=100.0, retry_at=116.0)
    assert seen.stale_text == "STALE 14 s, retry in 2 s"


def test_a_try_that_has_not_failed_yet_is_no_retry_in_0_s() -> None:
    seen = freshness(now=114.0, received=100.0, retry_at=113.0)
    assert seen.stale_text == "STALE 14 s, trying now"
    assert freshness(now=1.0, received=None, retry_at=1.2).retry_text == ", retry in 1 s"
    assert freshness(now=1.0, received=None).retry_text == ""


@pytest.mark.parametrize(("age", "mark"), [(1.9, "live"), (2.0, "stale"), (4.0, "stale")])
def test_without_a_connection_what_is_not_fresh_is_stale(age: float, mark: str) -> None:
    assert freshness(now=100 + age, received=100.0, connected=False).mark == mark


def test_the_servers_own_age_counts() -> None:
    assert freshness(now=101.0, received=100.0, sample_age=30.0).mark == "stale"


def test_before_the_first_answer_nothing_is_live() -> None:
    assert freshness(now=1.0, received=None).mark == "connecting"
