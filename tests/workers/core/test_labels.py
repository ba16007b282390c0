"""Classes of requests, as clients name them, on their way to the policy."""

from __future__ import annotations

from typing import Any

from workers.core.labels import MAX_LABELS, MAX_REQUESTS, OTHER, Labels


def test_labels_and_requests_are_bounded() -> None:
    labels = Labels()
    for number in range(MAX_LABELS + 5):
        labels.note(f"r{number}", f"class-{number}")
    assert labels.of("r0") == "class-0"
    assert labels.of(f"r{MAX_LABELS}") == OTHER
    assert labels.of("unknown") == ""
    for number in range(MAX_REQUESTS):
        labels.note(f"s{number}", "class-0")
    assert labels.of("r0") == ""
    assert len(labels._of_request) == MAX_REQUESTS


def test_the_policy_hears_of_them(bench: Any) -> None:
    heard: list[tuple[str, str]] = []
    policy = bench.pool.policy.policy
    original = policy.stored

    def stored(key: Any, now: float, label: str = "", request: str = "") -> None:
        heard.append((label, request))
        original(key, now, label, request)

    policy.stored = stored
    bench.pool.labels.note("1", "report")
    bench.store([bytes([number]) * 16 for number in (1, 2)])
    assert {label for label, request in heard if request == "1"} <= {"report"}
    assert heard
