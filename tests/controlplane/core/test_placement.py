"""Placement by cost and by the baselines: what counts, what does not, and who is tried next."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.core.placement import ALGORITHMS, Placing, Rules, place, shared_tokens
from controlplane.core.routing import PrefillOption, Source, TransferCost, prefill_candidates


class Times:
    """1 ms a computed token, nothing for cached ones."""

    def predict(self, uncached_tokens: int, cached_tokens: int) -> float:
        return uncached_tokens / 1000


def option(name: str, own: int = 0, queue: float = 0.0, running: int = 0) -> PrefillOption:
    return PrefillOption(name, f"n-{name}", own, queue, running, Times())


def order(
    options: list[PrefillOption], tokens: int = 1000, source: Source | None = None,
    placing: dict[str, Any] | None = None, **rules: Any,
) -> list[str]:  # fmt: skip
    placing = {"turn": 0, "chance": 1.0} | (placing or {})
    priced = place(Rules(**rules), options, Placing(tokens, **placing), source)
    return [one.option.worker_id for one in priced]


QUICK = TransferCost(seconds_per_token=0.0001)
SLOW = TransferCost(seconds_per_token=0.002)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestEveryAlgorithm:
    def test_orders_all_and_drops_none(self, algorithm: str) -> None:
        options = [option(name, own, queue) for name, own, queue in
                   (("a", 0, 0.5), ("b", 800, 0.1), ("c", 400, 0.0))]  # fmt: skip
        assert sorted(order(options, algorithm=algorithm)) == ["a", "b", "c"]
        assert order([], algorithm=algorithm) == []

    def test_the_terms_stand_in_the_record(self, algorithm: str) -> None:
        priced = place(Rules(algorithm=algorithm), [option("a", 400), option("b")], Placing(1000))  # type: ignore[arg-type]
        rows = prefill_candidates(priced, by_turn=algorithm == "round_robin")
        assert rows[0].verdict.startswith("chosen")
        assert {row.worker_id: row.prefill_seconds for row in rows} == {"a": 0.6, "b": 1.0}
        assert all(row.verdict for row in rows)


class TestCost:
    def test_a_transfer_that_is_slower_than_computing_is_not_made(self) -> None:
        source = Source("elsewhere", 900, {"n-a": SLOW})
        (slow,) = place(Rules(), [option("a")], Placing(1000), source)
        assert (slow.used_prefix_tokens, slow.transfer_seconds) == (0, 0.0)
        source = Source("elsewhere", 900, {"n-a": QUICK})
        (quick,) = place(Rules(), [option("a")], Placing(1000), source)
        assert (quick.used_prefix_tokens, quick.transfer_seconds) == (900, pytest.approx(0.09))

    def test_affinity_breaks_under_load(self) -> None:
        assert order([option("holder", 900, queue=0.5), option("idle")])[0] == "holder"
        assert order([option("holder", 900, queue=1.5), option("idle")])[0] == "idle"

    def test_work_counts_for_those_behind_it(self) -> None:
        busy = [option("holder", 900, queue=2.0), option("other", queue=1.2)]
        assert order(busy, load_weight=0.0)[0] == "holder"  # 2.1 s against 2.2 s
        further = [option("holder", 900, queue=2.4), option("other", queue=1.2)]
        assert order(further, load_weight=0.0)[0] == "other"
        assert order(further, load_weight=4.0)[0] == "holder"
        idle = [option("holder", 900, queue=1.5), option("other")]
        assert order(idle, load_weight=4.0)[0] == "other"  # nobody waits while one idles
        idle = [option("holder", 100), option("other")]
        assert order(idle, load_weight=4.0)[0] == "holder"

    def test_what_most_nodes_hold_is_no_reason(self) -> None:
        options = [option("a", 512, running=1), option("b", 512), option("c", 505)]
        shared = shared_tokens([512, 512, 505], 3)
        assert shared == 512
        assert order(options, placing={"shared_tokens": shared})[0] == "b"  # fewest running
        # of its own it would have been the longest prefix
        assert order([option("a", 512, running=1), option("c", 511)])[0] == "a"

    def test_alike_ones_take_turns(self) -> None:
        options = [option("a"), option("b"), option("c")]
        assert {order(options, placing={"turn": turn})[0] for turn in range(3)} == {"a", "b", "c"}

    def test_one_percent_explores_where_that_is_cheap(self) -> None:
        near = [option("a", 300), option("b", 100), option("c")]
        firsts = [order(near, placing={"chance": i / 1000})[0] for i in range(1000)]
        assert firsts.count("a") == 990
        assert {"b", "c"} < set(firsts)
        far = [
            option("a", 900),
            option("b", running=1),
            option("c"),
        ]  # b waits, c is ten times slower
        assert order(far, placing={"chance": 0.0})[0] == "a"
        rows = prefill_candidates(place(Rules(), near, Placing(1000, chance=0.0)))
        assert rows[0].verdict == "chosen: tried to keep predictions fresh"


class TestBaselines:
    def test_cache_aware_goes_to_the_longest_prefix(self) -> None:
        options = [option("a", 400, running=5), option("b", 100), option("c")]
        assert order(options, algorithm="cache_aware") == ["a", "b", "c"]

    def test_cache_aware_gives_way_when_loads_are_far_apart(self) -> None:
        options = [option("a", 900, running=9), option("b")]
        assert order(options, algorithm="cache_aware")[0] == "b"

    def test_cache_aware_passes_over_a_short_match(self) -> None:
        options = [option("a", 300, running=1), option("b")]
        assert order(options, algorithm="cache_aware")[0] == "b"

    def test_least_loaded_takes_turns_among_equals(self) -> None:
        options = [option("a", 900, running=1), option("b"), option("c")]
        firsts = [order(options, algorithm="least_loaded", placing={"turn": turn})[0]
                  for turn in range(3)]  # fmt: skip
        assert firsts == ["b", "b", "c"]

    def test_baselines_move_no_blocks(self) -> None:
        source = Source("elsewhere", 900, {"n-a": QUICK})
        for algorithm in ("cache_aware", "least_loaded", "round_robin"):
            (one,) = place(Rules(algorithm=algorithm), [option("a")], Placing(1000), source)  # type: ignore[arg-type]
            assert one.transfer_seconds == 0.0


def test_shared_is_what_more_than_half_hold() -> None:
    assert shared_tokens([], 4) == 0
    assert shared_tokens([900, 500], 4) == 0
    assert shared_tokens([900, 500, 100], 4) == 100
    assert shared_tokens([900], 1) == 0
