"""Fits find the line they are shown, stay sane on bad data, and queues count time once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.prediction import DecodeModel, LinearFit, PrefillModel, PrefillQueue


class TestLinearFit:
    def test_finds_a_line(self) -> None:
        fit = LinearFit((0.0, 0.0))
        for i in range(200):
            fit.observe((1.0, float(i % 7)), 3.0 + 0.5 * (i % 7))
        assert fit.predict((1.0, 10.0)) == pytest.approx(8.0, rel=0.01)

    def test_forgets_what_was(self) -> None:
        fit = LinearFit((0.0, 0.0))
        for i in range(100):
            fit.observe((1.0, float(i % 5)), 1.0 * (i % 5))
        for i in range(300):
            fit.observe((1.0, float(i % 5)), 4.0 * (i % 5))
        assert fit.predict((1.0, 5.0)) == pytest.approx(20.0, rel=0.05)

    @given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 100)), max_size=200))
    def test_stays_finite(self, samples: list[tuple[float, float]]) -> None:
        fit = LinearFit((0.1, 0.1))
        for x, y in samples:
            fit.observe((1.0, x), y)
        assert abs(fit.predict((1.0, 1.0))) < 1e9


class TestPrefillModel:
    def test_prior_answers_before_the_first_sample(self) -> None:
        assert PrefillModel().predict(2000, 0) > PrefillModel().predict(0, 2000) > 0.001

    def test_learns_what_a_worker_needs(self) -> None:
        model, rng = PrefillModel(), random.Random(1)
        for _ in range(100):
            uncached, cached = rng.randrange(4000), rng.randrange(4000)
            model.observe(uncached, cached, 0.03 + 0.0015 * uncached + 0.00001 * cached)
        assert model.predict(2000, 0) == pytest.approx(3.03, rel=0.02)
        assert model.predict(100, 1900) == pytest.approx(0.03 + 0.15 + 0.019, rel=0.1)

    def test_more_tokens_are_never_cheaper(self) -> None:
        model = PrefillModel()
        for _ in range(30):  # a contradiction: longer was faster
            model.observe(100, 0, 1.0)
            model.observe(4000, 0, 0.1)
        assert model.predict(5000, 0) >= model.predict(10, 0) >= 0


class TestPrefillQueue:
    def test_waits_add_up_and_progress_counts(self) -> None:
        queue = PrefillQueue()
        queue.start("a", 2.0, 1000, now=10.0)
        queue.start("b", 1.0, 500, now=10.5)
        assert queue.wait_seconds(10.5) == pytest.approx(2.5)
        assert queue.wait_seconds(20.0) == pytest.approx(1.0)  # a is late, b still to come
        assert queue.tokens == 1500

    def test_service_is_without_the_wait(self) -> None:
        queue = PrefillQueue()
        queue.start("a", 2.0, 10, now=0.0)
        queue.start("b", 1.0, 10, now=0.0)
        assert queue.end("a", 2.0) == pytest.approx(2.0)
        assert queue.end("b", 3.5) == pytest.approx(1.5)
        assert len(queue) == queue.tokens == 0
        assert queue.wait_seconds(4.0) == 0


def test_tbt_grows_with_what_runs() -> None:
    model = DecodeModel()
    for i in range(100):
        running = 1 + i % 8
        model.observe_tbt(running, 0.02 + 0.003 * running)
    assert model.predict_tbt(16) == pytest.approx(0.068, rel=0.05)
    assert model.predict_handover() is None
    model.observe_handover(0.5)
    assert model.predict_handover() == 0.5
