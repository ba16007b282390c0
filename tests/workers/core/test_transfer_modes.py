"""Push or pull, by what requests waited for."""

from __future__ import annotations

import pytest

from workers.core.transfer_choice import PRIORS
from workers.core.transfer_modes import MAX_PEERS, ModeCosts

MB = 1_000_000
TCP = (PRIORS["tcp"], PRIORS["tcp"])


def test_without_measurements_a_push_has_less_left_to_do_over_tcp() -> None:
    chosen = ModeCosts().choose("n1", 64 * MB, TCP, 0.0)
    assert chosen.mode == "push"
    assert chosen.pull_seconds > chosen.push_seconds
    assert "64000000 bytes" in chosen.why


def test_rdma_pulls_beat_tcp_pushes() -> None:
    links = (PRIORS["rdma"], PRIORS["tcp"])
    assert ModeCosts().choose("n1", 256 * MB, links, 0.0).mode == "pull"


def test_what_was_measured_decides_and_fades() -> None:
    costs = ModeCosts()
    for _ in range(5):
        costs.observe("n1", "push", 64 * MB, 0.5, 0.0)
        costs.observe("n1", "pull", 64 * MB, 0.05, 0.0)
    assert costs.choose("n1", 64 * MB, TCP, 1.0).mode == "pull"
    assert costs.choose("n2", 64 * MB, TCP, 1.0).mode == "push", "each source for itself"
    assert costs.choose("n1", 64 * MB, TCP, 1e5).mode == "push", "tried again some time"


def test_a_failed_push_is_followed_by_pulls_for_a_while() -> None:
    costs = ModeCosts()
    costs.push_failed("n1", 0.0)
    assert costs.choose("n1", 64 * MB, TCP, 0.0).mode == "pull"
    assert costs.choose("n1", 64 * MB, TCP, 600.0).mode == "push"
    [shown] = costs.report()
    assert shown.failed_pushes_total == 1


def test_what_is_set_wins_and_is_shown() -> None:
    costs = ModeCosts()
    chosen = costs.choose("n1", MB, TCP, 0.0, forced="pull")
    assert (chosen.mode, chosen.why) == ("pull", "set for this pair")
    [shown] = costs.report()
    assert (shown.source, shown.mode, shown.num_bytes) == ("n1", "pull", MB)
    assert shown.push_seconds == pytest.approx(chosen.push_seconds)


def test_what_is_set_since_the_last_choice_is_shown() -> None:
    """A source that was told to wait for pulls asks no more: its last question says push for ever."""
    costs = ModeCosts()
    assert costs.choose("n1", 64 * MB, TCP, 0.0).mode == "push"
    [shown] = costs.report(lambda source: "pull" if source == "n1" else None)
    assert (shown.mode, shown.why) == ("pull", "set for this pair")


def test_sources_are_bounded() -> None:
    costs = ModeCosts()
    for number in range(MAX_PEERS + 10):
        costs.choose(f"n{number}", MB, TCP, float(number))
    assert len(costs.report()) == MAX_PEERS
    assert costs.report()[-1].source != "n0"
