"""Seconds from leg 1's answer to leg 2's first byte, by where the KV lies and how much it is."""

from __future__ import annotations

import random

import pytest

from controlplane.core.handover import MAX_SOURCES, HandoverModel
from controlplane.core.routing import TransferCost

PATH = TransferCost(seconds_per_token=1e-5, base_seconds=0.01)


def taught(path: TransferCost | None = None, source: str = "n1") -> HandoverModel:
    model, rng = HandoverModel(), random.Random(2)
    for _ in range(60):
        tokens = rng.randrange(100, 30_000)
        seconds = (0.03 + 2e-5 * tokens) * rng.uniform(0.9, 1.1)
        model.observe(source, tokens, seconds, path)
    return model


@pytest.mark.parametrize("path", [None, PATH])
def test_long_prompts_do_not_speak_for_short_ones(path: TransferCost | None) -> None:
    model = taught(path)
    assert model.predict("n1", 100, path) == pytest.approx(0.032, rel=0.2)
    assert model.predict("n1", 30_000, path) == pytest.approx(0.63, rel=0.1)


def test_before_anything_came_the_path_says_it() -> None:
    model = HandoverModel()
    assert not model.knows("n1")
    assert model.predict("n1", 1000) is None
    assert model.predict("n1", 1000, PATH) == pytest.approx(0.02)


def test_a_new_source_begins_with_its_path_and_what_others_showed_besides() -> None:
    model = taught()
    fast = TransferCost(seconds_per_token=0.0, base_seconds=0.0)
    assert model.predict("n2", 10_000, fast) == pytest.approx(0.03, abs=0.01)
    assert model.predict("n2", 10_000, PATH) == pytest.approx(0.14, abs=0.02)
    model.observe("n2", 10_000, 0.5, PATH)
    assert model.knows("n2")
    assert model.predict("n1", 100) == pytest.approx(0.032, rel=0.2)


def test_sources_are_bounded() -> None:
    model = HandoverModel()
    for i in range(MAX_SOURCES + 5):
        model.observe(f"n{i}", 100, 0.1)
    assert not model.knows("n4")
    assert model.knows(f"n{MAX_SOURCES + 4}")


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_waits_that_vary_much_are_expected_by_their_mean(spread: float) -> None:
    """Now 100 ms and now 5 s, as where transfers queue: not the short ones alone count."""
    model, rng, seen = HandoverModel(), random.Random(9), []
    for _ in range(400):
        seen.append(rng.lognormvariate(0.0, spread))
        model.observe("n1", rng.randrange(500, 20_000), seen[-1])
    mean = sum(seen[-200:]) / 200
    assert model.predict("n1", 8000) == pytest.approx(mean, rel=0.4)


def test_one_odd_sample_says_little_and_a_change_is_learned() -> None:
    model = taught()
    model.observe("n1", 10_000, 60.0)
    assert model.predict("n1", 10_000) == pytest.approx(0.23, rel=0.6)
    for _ in range(100):
        model.observe("n1", 10_000, 3.0)
    assert model.predict("n1", 10_000) == pytest.approx(3.0, rel=0.3)
