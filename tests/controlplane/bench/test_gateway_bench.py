"""The gateway bench in its shortest form: what ran, and that its figures hang together."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.bench.gateway import Load, run_gateway_bench
from controlplane.bench.gateway_load import NUM_HEADS, PROMPT_TAIL, Kind, prompts


def test_prompts_share_their_beginnings_and_no_ends() -> None:
    kind = Kind(2_000, stream=True)
    found = list(prompts(kind, 2 * NUM_HEADS, seed=1))
    assert {len(prompt) for prompt in found} == {2_000}
    assert len({prompt[: -PROMPT_TAIL - 30] for prompt in found}) == NUM_HEADS
    assert len({prompt[-PROMPT_TAIL:] for prompt in found}) == len(found)
    assert set(found).isdisjoint(prompts(kind, 2 * NUM_HEADS, seed=2))


def test_times_are_taken_at_a_share_of_a_core() -> None:
    assert Load(core_share=0.25).rate_for(cpu_ms=0.5) == pytest.approx(500)
    assert Load(core_share=0.25, rate=40).rate_for(cpu_ms=0.5) == 40


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    kinds = (Kind(2_000, stream=True), Kind(2_000, stream=False))
    load = Load(requests=24, clients=4, rate=40, seconds=0.7)  # 28 requests for times
    return run_gateway_bench(peer_name=None, load=load, model_path=None, rounds=1, kinds=kinds)


def test_all_that_production_does_ran(result: dict[str, Any]) -> None:
    counted = result["counted"]
    assert counted["requests_total"] == 2 * (6 + 24 + 28)  # warm-up, CPU, times
    assert counted["tokenizer_mismatch_total"] > 24  # prompts that were tokenised
    assert counted["index_blocks"] > 0
    assert counted["decisions_dropped_total"] == 0


def test_figures_hang_together(result: dict[str, Any]) -> None:
    for kind in ("streamed", "plain"):
        row = result["chars"]["2000"][kind]
        assert row["cpu_ms"] > 0
        assert row["tokenise_ms"] > 0
        assert (row["rate_per_second"], row["timed_requests"]) == (40, 28)
        assert row["added_p50_ms"] == pytest.approx(row["ttft_p50_ms"] - row["direct_p50_ms"])
        assert row["ttft_p50_ms"] > row["direct_p50_ms"] > 0
        assert row["ttft_p99_ms"] >= row["ttft_p50_ms"]
        assert row["cpu_over_peer"] is None
        assert row["held_up_ms"] >= 0
        assert row["peer_held_up_ms"] is None
