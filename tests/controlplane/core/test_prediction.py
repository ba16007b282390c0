"""Models learn what workers need, begin at what geometry or peers say; and so do transfers."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.prediction import (
    MOST_REFUSED,
    DecodeModel,
    Predictor,
    PrefillModel,
    PrefillPrior,
    TransferModel,
    join_batches,
    prior_of,
    share_priors,
)
from workers.core.cost_model import H200_8B
from workers.core.disaggregation import geometry_of

_GEOMETRY = geometry_of({
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336,
})  # fmt: skip
assert _GEOMETRY is not None
LLAMA_8B = _GEOMETRY


class CostlyAttention:
    """A worker whose cold prefills follow an H200 with an 8B model."""

    @staticmethod
    def seconds(uncached: int, cached: int) -> float:
        return H200_8B.prefill(uncached + cached, cached)


class PriorPredictor:
    """The least that keeps the contract."""

    def __init__(self) -> None:
        self.num_samples = 0

    def predict(self, uncached_tokens: int, cached_tokens: int) -> float:
        return 0.01 + uncached_tokens * 1e-4

    def observe(self, uncached_tokens: int, cached_tokens: int, seconds: float) -> None:
        self.num_samples += seconds >= 0


@pytest.mark.parametrize("make", [PrefillModel, lambda: PrefillModel(prior_of(LLAMA_8B)),
                                  PriorPredictor])  # fmt: skip
class TestEveryPredictor:
    """What placement relies on, whatever the samples."""

    @given(samples=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6),
                                      st.floats(0, 1000)), max_size=30))  # fmt: skip
    def test_is_never_negative_and_never_falls_with_length(
        self, make: Callable[[], Predictor], samples: list[tuple[int, int, float]]
    ) -> None:
        model = make()
        for uncached, cached, seconds in samples:
            model.observe(uncached, cached, seconds)
        assert model.num_samples == len(samples)
        for cached in (0, 1000, 100_000):
            times = [model.predict(length, cached) for length in (0, 1, 100, 10_000, 10**6)]
            assert times == sorted(times)
            assert all(0 <= seconds < 1e12 for seconds in times)

    def test_predicting_changes_nothing(self, make: Callable[[], Predictor]) -> None:
        model = make()
        assert model.predict(1000, 0) == model.predict(1000, 0)
        model.observe(1000, 0, -1.0)  # a clock that went back is no sample
        assert model.num_samples == 0


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

    def test_attention_makes_long_prompts_dearer(self) -> None:
        model, rng = PrefillModel(), random.Random(2)
        for _ in range(100):
            uncached, cached = rng.randrange(1, 60_000), rng.randrange(30_000)
            model.observe(uncached, cached, CostlyAttention.seconds(uncached, cached))
        for uncached, cached in ((1000, 0), (16_384, 0), (65_536, 0), (8000, 8000)):
            actual = CostlyAttention.seconds(uncached, cached)
            assert model.predict(uncached, cached) == pytest.approx(actual, rel=0.25)
        error = model.calibration.median_relative_error()
        assert error is not None
        assert error < 0.1

    def test_geometry_gives_the_shape_and_one_sample_the_speed(self) -> None:
        model = PrefillModel(prior_of(LLAMA_8B))
        shape = model.predict(65_536, 0) / model.predict(16_384, 0)
        assert shape == pytest.approx(3.40 / 0.51, rel=0.1)  # as measured on an H200
        model.observe(16_384, 0, 0.51)
        assert model.predict(16_384, 0) == pytest.approx(0.51, rel=0.01)
        assert model.predict(65_536, 0) == pytest.approx(3.40, rel=0.2)

    def test_flops_that_are_given_count(self) -> None:
        slow = PrefillModel(prior_of(LLAMA_8B, flops=1e13))
        assert slow.predict(16_384, 0) > 10 * PrefillModel(prior_of(LLAMA_8B)).predict(16_384, 0)

    def test_a_new_worker_is_taken_for_its_peers(self) -> None:
        known, new = PrefillModel(), PrefillModel()
        for length in (1000, 2000, 4000) * 5:
            known.observe(length, 0, length * 2e-5)
        share_priors([known, new])
        assert new.predict(3000, 0) == pytest.approx(0.06, rel=0.1)
        new.observe(1000, 0, 0.2)
        share_priors([known, new])  # its own samples count from then on
        assert new.predict(1000, 0) == pytest.approx(0.2, rel=0.05)

    def test_more_tokens_are_never_cheaper(self) -> None:
        model = PrefillModel()
        for _ in range(30):  # a contradiction: longer was faster
            model.observe(100, 0, 1.0)
            model.observe(4000, 0, 0.1)
        assert model.predict(5000, 0) >= model.predict(10, 0) >= 0


def test_hearsay_halves_no_scale() -> None:
    model = PrefillModel()
    assert not model.refuses(1000, 0, 1e-3)
    for _ in range(3):
        model.observe(1000, 0, 0.2)
    assert model.refuses(1000, 0, 0.05)
    assert not model.refuses(1000, 0, 0.15)
    assert not model.refuses(1000, 0, 2.0)


def test_a_fit_far_too_high_comes_down_though_only_hearsay_is_left() -> None:
    """Its first samples were those of an engine that still compiled."""
    model = PrefillModel()
    for _ in range(3):
        model.observe(1000, 0, 5.0)
    for _ in range(400):
        if not model.refuses(1000, 0, 0.2):
            model.observe(1000, 0, 0.2)
    assert model.predict(1000, 0) < 0.4
    late = [model.refuses(1000, 0, 0.01) for _ in range(MOST_REFUSED)]
    assert all(late)
    assert not model.refuses(1000, 0, 0.2)  # one that is as it should be: late news again
    assert model.refuses(1000, 0, 0.01)


def test_tbt_grows_with_what_runs() -> None:
    model = DecodeModel()
    for i in range(100):
        running = 1 + i % 8
        model.observe_tbt(running, 0.02 + 0.003 * running)
    assert model.predict_tbt(16) == pytest.approx(0.068, rel=0.05)


def test_tbt_grows_with_the_kv_that_it_reads() -> None:
    model, rng = DecodeModel(), random.Random(3)
    for _ in range(200):
        running, tokens = rng.randrange(1, 32), rng.randrange(200_000)
        model.observe_tbt(running, 0.005 + 1e-4 * running + 2e-8 * tokens, tokens)
    assert model.predict_tbt(8, 100_000) == pytest.approx(0.0078, rel=0.05)
    error = model.calibration.median_relative_error()
    assert error is not None
    assert error < 0.05


def test_transfers_of_a_pair_are_learned() -> None:
    model = TransferModel(0.001, 1e-7)
    assert not model.is_fitted
    for tokens in (1000, 4000, 16_000, 8000):
        model.observe(tokens, 0.002 + 5e-6 * tokens)
    model.observe(0, 1.0)  # nothing was moved
    assert model.num_samples == 4
    assert model.predict(10_000) == pytest.approx(0.052, rel=0.02)


def taught_by_batches(rng: random.Random, batch: int) -> PrefillModel:
    """An engine of 0.1 s and 20,000 tokens a second; legs of one step end together."""
    model = PrefillModel(prior_of(LLAMA_8B))
    for _ in range(80):
        prompts = [rng.randrange(500, 8000) for _ in range(rng.randint(1, batch))]
        whole = 0.1 + sum(prompts) / 20_000
        ends = [whole, *(rng.uniform(0.0, 0.003) for _ in prompts[1:])]
        samples = [(tokens, 0, end) for tokens, end in zip(prompts, ends, strict=True)]
        for sample in join_batches(samples):
            model.observe(*sample)
    return model


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_prompts_computed_in_one_step_do_not_teach_that_work_is_free(batch: int) -> None:
    model = taught_by_batches(random.Random(4), batch)
    assert model.predict(4000, 0) == pytest.approx(0.3, rel=0.35)
    assert model.predict(16_000, 0) == pytest.approx(0.9, rel=0.35)


def test_one_sample_near_zero_does_not_outweigh_the_others() -> None:
    model, rng = PrefillModel(prior_of(LLAMA_8B)), random.Random(6)
    for _ in range(60):
        tokens = rng.randrange(500, 20_000)
        model.observe(tokens, 0, 0.05 + tokens / 20_000)
    model.observe(17_000, 0, 0.0)
    assert model.predict(17_000, 0) > 0.5


def test_what_the_few_long_prompts_showed_outlasts_hundreds_of_short_ones() -> None:
    """Their attention costs more than their weights; it is half forgotten when the next one comes,
    and whoever waits behind that one is told too little."""
    model, rng = PrefillModel(PrefillPrior(per_attended=0.0)), random.Random(8)
    worker = CostlyAttention()
    for tokens in (60_000, 110_000, 80_000, 120_000):
        model.observe(tokens, 0, worker.seconds(tokens, 0) * rng.uniform(0.95, 1.05))
    for _ in range(600):
        tokens = rng.randrange(500, 6000)
        model.observe(tokens, 0, worker.seconds(tokens, 0) * rng.uniform(0.9, 1.1))
    assert model.predict(100_000, 0) == pytest.approx(worker.seconds(100_000, 0), rel=0.15)
    assert model.predict(3000, 0) == pytest.approx(worker.seconds(3000, 0), rel=0.15)
