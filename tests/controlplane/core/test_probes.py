"""Which would-be rejections are let in."""

from __future__ import annotations

import itertools
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.probes import ProbeTurns


def due(turns: ProbeTurns, share: float, rng: Random) -> bool:
    return turns.is_due(share, rng.random())


@given(st.integers(0, 1000))
def test_the_first_nine_rejections_of_a_trial_are_rejections(seed: int) -> None:
    turns, rng = ProbeTurns(), Random(seed)
    assert not any(due(turns, 0.05, rng) for _ in range(9))


@given(st.sampled_from((0.01, 0.05, 0.2, 0.5)), st.integers(0, 100))
def test_the_share_is_kept_on_average_and_distances_vary(share: float, seed: int) -> None:
    turns, rng = ProbeTurns(), Random(seed)
    number = round(400 / share)
    probes = [i for i in range(number) if due(turns, share, rng)]
    assert 0.85 * share <= len(probes) / number <= 1.2 * share
    distances = {b - a for a, b in itertools.pairwise(probes)}
    assert len(distances) > 1
    assert max(distances) <= 1.5 / share + 1


def test_none_at_share_0_and_a_raised_share_acts_at_once() -> None:
    turns, rng = ProbeTurns(), Random(0)
    assert not any(due(turns, 0.0, rng) for _ in range(1000))
    assert not due(turns, 0.001, rng)  # the next in 500 to 1,500
    assert any(due(turns, 0.5, rng) for _ in range(3))


def test_probes_that_meet_their_slo_bring_more_and_one_that_does_not_ends_that() -> None:
    def share(turns: ProbeTurns) -> float:
        return sum(due(turns, 0.05, rng) for _ in range(2000)) / 2000

    turns, rng = ProbeTurns(), Random(1)
    usual = share(turns)
    for _ in range(10):
        turns.ended(met=True)
    assert 6 * usual < share(turns) < 10 * usual
    turns.ended(met=False)
    assert share(turns) < 1.5 * usual
