"""R31, word by word."""

import pytest

from controlplane.core.routing import (
    DecodeOption,
    PrefillOption,
    Source,
    TransferCost,
    decode_candidates,
    order_by_cost,
    order_by_turn,
    order_decode,
    prefill_candidates,
    price,
)


class Times:
    """1 ms a computed token, nothing for cached ones."""

    def predict(self, uncached_tokens: int, cached_tokens: int) -> float:
        return uncached_tokens / 1000


def option(name: str, own: int = 0, queue: float = 0.0, running: int = 0) -> PrefillOption:
    return PrefillOption(name, f"n-{name}", own, queue, running, Times())


TRANSFER = TransferCost(seconds_per_token=0.0001, base_seconds=0.005)


class TestPrice:
    def test_no_transfer_when_nobody_holds_anything(self) -> None:
        priced = price(option("a"), 1000, 0, 1.25, TRANSFER)
        assert (priced.used_prefix_tokens, priced.transfer_seconds) == (0, 0.0)
        assert priced.ttft_seconds == pytest.approx(1.0)

    def test_own_zero_with_best_above_counts_as_above_the_threshold(self) -> None:
        priced = price(option("a"), 1000, 800, 1.25, TRANSFER)
        assert priced.used_prefix_tokens == 800
        assert priced.transfer_seconds == pytest.approx(0.085)
        assert priced.prefill_seconds == pytest.approx(0.2)

    @pytest.mark.parametrize(("own", "used"), [(640, 640), (639, 800)])
    def test_threshold_is_best_over_own(self, own: int, used: int) -> None:
        priced = price(option("a", own), 1000, 800, 1.25, TRANSFER)
        assert priced.used_prefix_tokens == used
        transferred = used - own
        assert priced.transfer_seconds == pytest.approx(
            TRANSFER.seconds(transferred) if transferred else 0.0
        )

    def test_without_a_path_the_own_prefix_counts(self) -> None:
        priced = price(option("a", 100), 1000, 900, 1.25, None)
        assert (priced.used_prefix_tokens, priced.transfer_seconds) == (100, 0.0)

    def test_queue_is_a_term(self) -> None:
        priced = price(option("a", queue=0.3), 1000, 0, 1.25, TRANSFER)
        assert priced.ttft_seconds == pytest.approx(0.3 + 1.0)


class TestOrder:
    def test_the_smallest_sum_wins(self) -> None:
        near = option("near", own=900, queue=0.9)
        paths = Source("n-near", 900, {"n-far": TRANSFER})
        ordered = order_by_cost([near, option("far", queue=0.0)], 1000, 1.25, paths)
        assert [p.option.worker_id for p in ordered] == ["far", "near"]  # 0.295 against 1.0
        ordered = order_by_cost([near, option("far", queue=0.0)], 1000, 1.25, None)
        assert [p.option.worker_id for p in ordered] == ["far", "near"]  # even without a path
        ordered = order_by_cost([option("near", 900, 0.8), option("far")], 1000, 1.25, None)
        assert [p.option.worker_id for p in ordered] == ["near", "far"]

    def test_the_source_may_have_no_prefill_worker(self) -> None:
        paths = Source("elsewhere", 900, {"n-b": TRANSFER})
        first, second = order_by_cost([option("a"), option("b")], 1000, 1.25, paths)
        assert (first.option.worker_id, first.used_prefix_tokens) == ("b", 900)
        assert (second.used_prefix_tokens, second.transfer_seconds) == (0, 0.0)

    def test_equals_go_to_who_runs_less(self) -> None:
        ordered = order_by_cost([option("a", running=2), option("b", running=1)], 100)
        assert [p.option.worker_id for p in ordered] == ["b", "a"]

    def test_round_robin_takes_turns_by_id(self) -> None:
        options = [option("b"), option("a"), option("c", own=99)]
        first = [order_by_turn(options, 100, turn)[0].option.worker_id for turn in range(4)]
        assert first == ["a", "b", "c", "a"]
        assert order_by_turn([], 100, 0) == []

    def test_verdicts_name_the_term(self) -> None:
        rows = prefill_candidates(order_by_cost([option("a", queue=0.024), option("b")], 1000))
        assert [row.verdict for row in rows] == ["chosen", "24 ms slower: queue"]
        rows = prefill_candidates(order_by_cost([option("a")], 1310), broken_slo_seconds=1.0)
        assert rows[0].verdict == "breaks TTFT SLO by 310 ms"


class TestDecode:
    def test_predicted_tbt_then_the_share_in_use(self) -> None:
        a = DecodeOption("a", "n", running=4, cap=16, predicted_tbt_seconds=0.02)
        b = DecodeOption("b", "n", running=2, cap=4, predicted_tbt_seconds=0.0101)
        c = DecodeOption("c", "n", running=4, cap=16, predicted_tbt_seconds=0.01)
        full = DecodeOption("d", "n", running=4, cap=4)
        drained = DecodeOption("e", "n", running=0, cap=0)
        assert [o.worker_id for o in order_decode([a, b, c, full, drained])] == ["c", "b", "a"]
        verdicts = {o.worker_id: o.verdict for o in decode_candidates([c, full, a], "c")}
        assert verdicts == {
            "c": "chosen", "d": "full: 4 of 4 run", "a": "10 ms slower a token",
        }  # fmt: skip

    def test_each_term_of_the_order_has_its_words(self) -> None:
        chosen = DecodeOption("a", "n", running=4, cap=16, predicted_tbt_seconds=0.01)
        others = [
            DecodeOption("b", "n", running=5, cap=16, predicted_tbt_seconds=0.01),
            DecodeOption("c", "n", 4, 16, 0.01, handover_seconds=0.012),
            DecodeOption("d", "n", running=4, cap=16, predicted_tbt_seconds=0.01),
            DecodeOption("e", "n", running=1, cap=16, predicted_tbt_seconds=0.0125),
        ]
        assert [o.worker_id for o in order_decode([chosen, *others])] == ["a", "d", "c", "b", "e"]
        assert [o.verdict for o in decode_candidates([chosen, *others], "a")] == [
            "chosen", "busier: 5 of 16 run", "handover 12 ms longer",
            "equal: a later id or less room", "2.5 ms slower a token",
        ]  # fmt: skip
        nobody = decode_candidates([chosen], "")
        assert [o.verdict for o in nobody] == ["free: 4 of 16 run"]

    def test_one_without_a_prediction_is_judged_by_its_share(self) -> None:
        known = DecodeOption("a", "n", running=4, cap=16, predicted_tbt_seconds=0.01)
        new = DecodeOption("b", "n", running=0, cap=16)
        assert [o.worker_id for o in order_decode([known, new])] == ["b", "a"]

    def test_memory_goes_before_speed(self) -> None:
        quick = DecodeOption("a", "n", 1, 16, 0.01, kv_tokens=9000, kv_capacity_tokens=10_000)
        roomy = DecodeOption("b", "n", 8, 16, 0.02, kv_tokens=9000, kv_capacity_tokens=50_000)
        assert [o.worker_id for o in order_decode([quick, roomy], tokens=500)] == ["a", "b"]
        assert [o.worker_id for o in order_decode([quick, roomy], tokens=2000)] == ["b", "a"]
        verdicts = [o.verdict for o in decode_candidates([roomy, quick], "b")]
        assert verdicts == ["chosen", "less memory: 9000 of 10000 KV tokens in use"]
        tight = DecodeOption("c", "n", 1, 16, 0.01, kv_tokens=9500, kv_capacity_tokens=10_000)
        (row,) = decode_candidates([tight], "b")
        assert row.verdict == "memory: 9500 of 10000 KV tokens in use"
