"""The bound under which disaggregation pays."""

from __future__ import annotations

import pytest

from workers.core.disaggregation import (
    Geometry,
    bound_by_geometry,
    bound_by_rate,
    gbps,
    geometry_of,
    prefill_rate,
)

LLAMA_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
}


def geometry() -> Geometry:
    found = geometry_of(LLAMA_70B)
    assert found is not None
    return found


class TestGeometry:
    def test_of_a_large_model(self) -> None:
        found = geometry()
        assert found.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2  # 320 KiB
        assert found.layers * found.weights == pytest.approx(68.5e9, rel=0.02)

    def test_a_config_that_says_too_little(self) -> None:
        assert geometry_of({"hidden_size": 8192}) is None
        assert geometry_of({**LLAMA_70B, "num_hidden_layers": "80"}) is None

    def test_without_grouped_queries_each_head_has_its_own(self) -> None:
        config = {name: v for name, v in LLAMA_70B.items() if name != "num_key_value_heads"}
        found = geometry_of(config)
        assert found is not None
        assert found.kv_bytes_per_token == 8 * geometry().kv_bytes_per_token


class TestBound:
    @pytest.mark.parametrize(("flops", "published"), [(8 * 312e12, 6e9), (8 * 989e12, 19e9)])
    def test_agrees_with_what_was_published(self, flops: float, published: float) -> None:
        bound = bound_by_geometry(geometry(), flops, 8192)
        assert bound.bytes_per_second == pytest.approx(published, rel=0.2)

    def test_longer_prompts_need_less(self) -> None:
        short, long = (geometry().bytes_per_flop(tokens) for tokens in (1024, 65_536))
        assert long < short

    def test_both_ways_say_the_same(self) -> None:
        of_geometry = bound_by_geometry(geometry(), 1e15, 8192)
        seconds = geometry().flops(8192) / 1e15
        rate = bound_by_rate(geometry().kv_bytes_per_token, 8192 / seconds, "measured")
        assert rate.bytes_per_second == pytest.approx(of_geometry.bytes_per_second)


def test_the_prefill_rate_rests_on_long_prompts() -> None:
    short = [(10, 1.0)] * 50
    assert prefill_rate(short) is None
    assert prefill_rate([*short, (1000, 1.0), (2000, 1.0)]) is None
    assert prefill_rate([*short, (1000, 1.0), (2000, 1.0), (3000, 1.0), (500, 0.0)]) == 2000


def test_gbps() -> None:
    assert (gbps(4.75e9), gbps(1.5e9), gbps(5e7)) == ("38 Gbps", "12 Gbps", "0.4 Gbps")
