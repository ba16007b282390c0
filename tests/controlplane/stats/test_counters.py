"""Counters, histograms, buckets: never negative, never more hits than tokens, gaps are gaps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.stats.bucket import Bucket, decode, encode, merged
from controlplane.stats.counters import CounterTracker, HistogramTracker
from controlplane.stats.histogram import bucket_of, quantile
from controlplane.stats.window import Window


class TestCounterTracker:
    def test_a_source_seen_late_begins_with_a_gap(self):
        tracker = CounterTracker()
        assert tracker.step(1, started_at=0, values={"requests": 50}, at=100).increments is None
        assert tracker.step(1, 0, {"requests": 53}, 101).increments == {"requests": 3}

    def test_a_fresh_source_counts_from_zero(self):
        step = CounterTracker().step(1, started_at=99.5, values={"requests": 1}, at=100)
        assert (step.increments, step.reset) == ({"requests": 1}, False)

    @pytest.mark.parametrize("after", [0, 5, 100])
    def test_a_restart_is_a_marked_gap_even_past_the_old_value(self, after):
        tracker = CounterTracker()
        tracker.step(1, 0, {"requests": 10}, 100)
        step = tracker.step(2, 101, {"requests": after}, 102)
        assert (step.increments, step.reset) == (None, True)
        assert tracker.step(2, 101, {"requests": after + 2}, 103).increments == {"requests": 2}

    def test_a_fall_within_one_life_is_a_reset_too(self):
        tracker = CounterTracker()
        tracker.step(1, 0, {"requests": 10}, 100)
        assert tracker.step(1, 0, {"requests": 3}, 101).reset

    def test_hits_wait_for_their_tokens(self):
        tracker = CounterTracker()
        tracker.step(1, 0, {"prompt_tokens": 0, "hit_tokens": 0}, 100)
        early = tracker.step(1, 0, {"prompt_tokens": 10, "hit_tokens": 30}, 101)
        late = tracker.step(1, 0, {"prompt_tokens": 40, "hit_tokens": 30}, 102)
        assert early.increments == {"prompt_tokens": 10, "hit_tokens": 10}
        assert late.increments == {"prompt_tokens": 30, "hit_tokens": 20}

    @given(
        st.lists(st.tuples(st.integers(1, 3), st.integers(0, 50), st.integers(0, 50)), max_size=30)
    )
    @settings(max_examples=60, deadline=None)
    def test_numbers_are_possible_whatever_comes(self, samples):
        tracker = CounterTracker()
        for at, (epoch, prompt, hits) in enumerate(samples):
            values = {"prompt_tokens": float(prompt), "hit_tokens": float(hits)}
            increments = tracker.step(epoch, 0, values, at).increments
            if increments is not None:
                assert 0 <= increments["hit_tokens"] <= increments["prompt_tokens"]

    def test_histograms_follow_the_counters(self):
        counters, histograms = CounterTracker(), HistogramTracker()
        first = histograms.step({"ttft": [5, 5]}, counters.step(1, 0, {"requests": 10}, 100))
        second = histograms.step({"ttft": [6, 7]}, counters.step(1, 0, {"requests": 13}, 101))
        reset = histograms.step({"ttft": [1, 0]}, counters.step(2, 102, {"requests": 1}, 102))
        assert (first, second, reset) == ({}, {"ttft": [1, 2]}, {})


class TestQuantile:
    BOUNDS = (1.0, 2.0, 4.0)

    def test_interpolates_within_a_bucket(self):
        assert quantile(self.BOUNDS, [0, 10, 0, 0], 0.5) == pytest.approx(1.5)

    def test_unknown_without_observations(self):
        assert quantile(self.BOUNDS, [0, 0, 0, 0], 0.5) is None

    def test_the_open_bucket_answers_its_lower_bound(self):
        assert quantile(self.BOUNDS, [0, 0, 0, 3], 0.95) == 4.0

    @given(
        st.lists(st.integers(0, 20), min_size=4, max_size=4),
        st.floats(0.01, 0.99),
        st.floats(0.01, 0.99),
    )
    @settings(max_examples=60, deadline=None)
    def test_rises_with_the_share(self, counts, a, b):
        low = quantile(self.BOUNDS, counts, min(a, b))
        high = quantile(self.BOUNDS, counts, max(a, b))
        assert low is None or (high is not None and low <= high)

    def test_bucket_of_agrees(self):
        assert [bucket_of(self.BOUNDS, v) for v in (0.5, 1.0, 3.0, 9.0)] == [0, 0, 2, 3]


class TestBucket:
    def test_merging_adds_counters_and_keeps_the_worst_gauge(self):
        first = Bucket({"requests": 1.0}, {"running": 5.0}, {}, False)
        second = Bucket({"requests": 2.0}, {"running": 3.0}, {}, True)
        total = merged([first, second])
        assert (total.value("requests"), total.value("running"), total.reset) == (3.0, 5.0, True)
        assert total.value("rejected") is None, "unknown is not 0"

    def test_percentiles_come_from_the_merged_histogram(self):
        fast = Bucket({}, {}, {"ttft": [10] + [0] * 22}, False)
        slow = Bucket({}, {}, {"ttft": [0] * 10 + [90] + [0] * 12}, False)
        assert merged([fast, slow]).value("ttft_p50_seconds") > 0.3

    def test_survives_the_database(self):
        bucket = Bucket({"requests": 1.5}, {"running": 2.0}, {"ttft": [1] + [0] * 22}, True)
        assert decode(encode(bucket)) == bucket


class TestWindow:
    def test_frames_close_in_tens_and_the_oldest_leave(self):
        window = Window()
        closed = []
        for at in range(1000, 2000):
            done = window.add(at, {"cluster": Bucket({"requests": 1.0}, {}, {}, False)})
            if done:
                closed.append(done)
        assert [at for at, _ in closed[:3]] == [1000, 1010, 1020]
        assert closed[0][1]["cluster"].counters["requests"] == 10
        assert window.since("cluster", 1980).counters["requests"] == 20
        assert window.since("cluster", 0).counters["requests"] == 910
        assert window.sources("clu", 0) == {"cluster"}
