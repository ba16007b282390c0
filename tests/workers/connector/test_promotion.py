"""Blocks on SSD: asked for once, waited for as long as that beats computing them."""

from __future__ import annotations

import pytest

from workers.connector.metadata import LoadResult, StepResults
from workers.connector.planner import Scheduled
from workers.connector.promotion import PromotionJudge, Rate
from workers.core.hashing import block_hashes, root_hash

NAMESPACE = b"n" * 32
BLOCK = 8


def keys(num_tokens, salt=None):
    tokens = list(range(100, 100 + num_tokens))
    return block_hashes(root_hash(NAMESPACE, salt, None), tokens, BLOCK)


class TestRate:
    def test_unknown_before_the_first_measurement(self):
        assert Rate().of(5) is None

    def test_large_measurements_count_more(self):
        rate = Rate()
        rate.add(1, 1.0, 0.0)
        rate.add(99, 1.0, 1.0)
        assert rate.of(1) < 0.03

    def test_it_follows_a_change(self):
        rate = Rate()
        for step in range(30):
            rate.add(10, 10.0, step)
        for step in range(30):
            rate.add(10, 0.1, 30 + step)
        assert rate.of(1) == pytest.approx(0.01, rel=0.2)

    @pytest.mark.parametrize(("units", "seconds"), [(0, 1.0), (-1, 1.0), (1, -0.1)])
    def test_nonsense_is_left_out(self, units, seconds):
        rate = Rate()
        rate.add(units, seconds, 0.0)
        assert rate.of(1) is None


class TestJudge:
    def test_says_yes_until_both_are_known(self):
        judge = PromotionJudge(1.0)
        assert judge.pays(4, 32, 0.0)
        judge.note_promotion(1, 100.0, 0.0)
        assert judge.pays(4, 32, 0.0)

    def test_compares_what_was_measured(self):
        judge = PromotionJudge(1.0)
        judge.note_step(100, 1.0, 0.0)  # 10 ms a token
        judge.note_promotion(10, 0.1, 0.0)  # 10 ms a block
        assert judge.pays(4, 32, 0.0)
        judge.note_promotion(10, 20.0, 0.0)
        assert not judge.pays(4, 32, 1.0)

    def test_an_old_bad_measurement_is_tried_again(self):
        judge = PromotionJudge(1.0)
        judge.note_step(100, 0.1, 0.0)
        judge.note_promotion(10, 20.0, 0.0)
        assert not judge.pays(4, 32, 29.0)
        assert judge.pays(4, 32, 31.0)

    def test_patience_is_the_recompute_within_the_bound(self):
        judge = PromotionJudge(1.0)
        assert judge.patience(32) == 1.0
        judge.note_step(100, 1.0, 0.0)
        assert judge.patience(32) == pytest.approx(0.32)
        assert judge.patience(1000) == 1.0


@pytest.fixture
def planner(make_planner):
    planner = make_planner()
    yield planner
    planner.check_integrity()


@pytest.fixture
def held_and_on_disk(pool):
    """Two blocks in memory, two more on SSD."""
    pool.fill(keys(40)[:2])
    pool.on_disk = set(keys(40)[2:4])


@pytest.mark.usefixtures("held_and_on_disk")
class TestMatch:
    def test_asks_once_and_comes_back_until_they_are_there(self, planner, pool, make_info):
        planner.add(make_info(40))
        for step in range(10):
            assert planner.match("r1", 0, 40, step * 0.05) is None
        ((owner, hashes, urgency),) = pool.promotions
        assert owner == "load:w1:r1"
        assert hashes == keys(40)[:4]
        assert urgency == "first_token"
        pool.read_disk()
        assert planner.match("r1", 0, 40, 0.6) == 32
        assert planner.take_counts()["promoted_blocks"] == 2

    def test_only_what_the_request_can_use_is_asked_for(self, planner, pool, make_info):
        pool.fill(keys(40)[2:4], parent=keys(40)[1])
        pool.on_disk = {keys(40)[4]}  # the last block holds the token that must be computed
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) == 32
        assert not pool.promotions

    def test_what_the_device_holds_is_not_asked_for(self, planner, pool, make_info):
        planner.add(make_info(40))
        assert planner.match("r1", 24, 40, 0.0) is None
        assert pool.promotions[0][1] == keys(40)[3:4]

    def test_patience_ends_and_takes_what_is_there(self, planner, pool, make_info):
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) is None
        assert planner.match("r1", 0, 40, 0.99) is None
        assert planner.match("r1", 0, 40, 1.01) == 16
        assert planner.match("r1", 0, 40, 1.02) == 16
        assert planner.take_counts()["promotions_given_up"] == 1
        assert len(pool.promotions) == 1

    def test_patience_is_what_computing_would_take(self, planner, pool, make_info):
        learn_steps(planner, make_info, seconds_a_token=0.001)
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 100.0) is None
        assert planner.match("r1", 0, 40, 100.010) is None
        assert planner.match("r1", 0, 40, 100.030) == 16  # 16 tokens are computed in 16 ms

    def test_a_slow_disk_is_not_asked_any_more(self, planner, pool, make_info):
        learn_steps(planner, make_info, seconds_a_token=0.001)
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 100.0) is None
        assert planner.match("r1", 0, 40, 100.5) == 16
        planner.add(make_info(40, "r2"))
        assert planner.match("r2", 0, 40, 101.0) == 16
        assert len(pool.promotions) == 1
        assert planner.take_counts()["promotions_skipped"] == 1

    def test_leg_one_that_computes_has_them_brought_for_leg_two(self, planner, pool, make_info):
        learn_steps(planner, make_info, seconds_a_token=0.001)
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 100.0) is None
        assert planner.match("r1", 0, 40, 100.5) == 16
        planner.add(make_info(40, "r2", transfer_id="t", leg="prefill"))
        assert planner.match("r2", 0, 40, 101.0) == 16
        owner, hashes, urgency = pool.promotions[-1]
        assert (owner, hashes, urgency) == ("transfer:t", keys(40)[:4], "batch")

    def test_no_answer_is_a_miss(self, planner, pool, make_info):
        planner.add(make_info(40))
        pool.promote = lambda *_: None
        assert planner.match("r1", 0, 40, 0.0) == 16
        assert planner.match("r1", 0, 40, 0.1) == 16

    def test_blocks_lost_on_disk_end_the_wait(self, planner, pool, make_info):
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) is None
        pool.on_disk.clear()
        assert planner.match("r1", 0, 40, 0.1) == 16

    def test_pins_end_with_the_load(self, planner, pool, make_info):
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) is None
        assert pool.state.num_pinned == 2
        pool.read_disk()
        assert planner.match("r1", 0, 40, 0.1) == 32
        planner.allocate("r1", list(range(1, 11)), 32, 0.1)
        (order,) = planner.step([], 0.1).loads
        assert len(order.blocks) == 4
        planner.finish("r1", completed=True)
        assert pool.state.num_pinned == 0

    def test_pins_end_where_nothing_is_loaded_after_all(self, planner, pool, make_info):
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) is None
        planner.allocate("r1", list(range(1, 11)), 0, 0.1)
        assert pool.state.num_pinned == 0

    def test_b04_an_abort_while_waiting_leaves_nothing(self, planner, pool, make_info):
        for number in range(20):
            planner.add(make_info(40, f"r{number}"))
            assert planner.match(f"r{number}", 0, 40, float(number)) is None
            planner.finish(f"r{number}", completed=False)
        assert pool.state.num_pinned == 0
        assert planner.num_requests() == 0
        pool.read_disk()
        for owner, *_ in pool.promotions:
            pool.release(owner)  # as the agent does for an owner that is gone
        planner.add(make_info(40, "normal"))
        assert planner.match("normal", 0, 40, 30.0) == 32

    def test_the_wait_is_reported(self, planner, pool, make_info):
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) is None
        pool.read_disk()
        assert planner.match("r1", 0, 40, 0.4) == 32
        planner.allocate("r1", list(range(1, 11)), 32, 0.4)
        planner.finish("r1", completed=True)
        assert pool.reports[0].kv_wait_by_stage_seconds["queue"] == pytest.approx(0.4)


class TestEarly:
    def test_requests_that_wait_for_a_turn_are_promoted_in_bulk(self, planner, pool, make_info):
        """r2 is behind r1, and the engine has no room for it in this step."""
        pool.fill(keys(40, "b")[:1])
        pool.on_disk = set(keys(40, "b")[1:3])
        planner.add(make_info(40))
        planner.add(make_info(40, "r2", cache_salt="b"))
        assert planner.match("r1", 0, 40, 0.0) == 0
        planner.allocate("r1", list(range(1, 11)), 0, 0.0)
        planner.step([Scheduled("r1", 0, 40, list(range(1, 11)), replaces_blocks=True)], 0.0)
        ((owner, hashes, urgency),) = pool.promotions
        assert (owner, hashes, urgency) == ("load:w1:r2", keys(40, "b")[:3], "batch")
        planner.step([], 0.01)
        assert len(pool.promotions) == 1
        planner.finish("r2", completed=False)
        assert pool.state.num_pinned == 0

    def test_its_turn_makes_it_urgent(self, planner, pool, make_info):
        pool.fill(keys(40, "b")[:1])
        pool.on_disk = set(keys(40, "b")[1:3])
        planner.add(make_info(40))
        planner.add(make_info(40, "r2", cache_salt="b"))
        planner.match("r1", 0, 40, 0.0)
        planner.step([], 0.0)
        assert planner.match("r2", 0, 40, 0.5) is None
        assert [urgency for _, _, urgency in pool.promotions] == ["batch", "first_token"]


class TestLookups:
    def test_all_that_wait_are_asked_about_in_one_round_trip(self, planner, pool, make_info):
        for number in range(10):
            planner.add(make_info(40, f"r{number}", cache_salt=str(number)))
        for number in range(10):
            assert planner.match(f"r{number}", 0, 40, 0.0) == 0
        assert pool.num_lookups == 1
        assert len(pool.looked_up) == 10

    def test_each_question_names_its_request_the_same_for_both_legs(self, planner, pool, make_info):
        planner.add(make_info(40, "cmpl-1", transfer_id="t1", leg="prefill"))
        planner.add(make_info(40, "cmpl-2", transfer_id="t2", leg="decode"))
        planner.add(make_info(40, "cmpl-3"))
        planner.match("cmpl-1", 0, 40, 0.0)
        planner.match("cmpl-1", 0, 40, 60.0)
        assert set(pool.asked_for) == {"t1", "t2", "load:w1:cmpl-3"}
        assert pool.asked_for.count("t1") == 2, "another question, the same request"

    def test_waiting_requests_are_asked_about_together_again(self, planner, pool, make_info):
        for number in range(3):
            salt = str(number)
            pool.on_disk |= set(keys(40, salt)[:2])
            planner.add(make_info(40, f"r{number}", cache_salt=salt))
        for now in (0.0, 0.1, 0.2):
            for number in range(3):
                assert planner.match(f"r{number}", 0, 40, now) is None
        assert pool.num_lookups == 3

    def test_a_round_trip_is_bounded(self, planner, pool, make_info):
        for number in range(100):
            planner.add(make_info(40, f"r{number}", cache_salt=str(number)))
        planner.match("r0", 0, 40, 0.0)
        assert len(pool.looked_up) <= 32

    def test_b38_tokens_found_locally_are_no_query(self, planner, pool, make_info):
        """Of 400 tokens 240 are on the device and 80 in the pool: 160 asked for, 80 hit."""
        pool.fill(keys(400)[:40])
        planner.add(make_info(400))
        external = planner.match("r1", 240, 400, 0.0)
        assert external == 80
        (chain,) = pool.looked_up
        assert chain == keys(400)[30:49]  # the last block holds the token to compute
        planner.allocate("r1", list(range(1, 101)), external, 0.0)
        planner.finish("r1", completed=True)
        (report,) = pool.reports
        assert (report.device_hit_tokens, report.pool_hit_tokens) == (240, 80)
        assert report.prompt_tokens - report.device_hit_tokens == 160


class TestLeases:
    def test_b02_what_is_waited_for_or_read_is_kept(self, planner, pool, make_info):
        planner.add(make_info(40, transfer_id="t", leg="decode", expected_blocks=5))
        assert pool.kept == {"transfer:t"}
        planner.finish("r1", completed=False)
        assert pool.kept == set()

    def test_it_is_kept_until_the_load_is_verified(self, planner, pool, make_info):
        pool.fill(keys(40)[:4])
        planner.add(make_info(40, transfer_id="t", leg="decode", expected_blocks=5))
        planner.allocate("r1", list(range(1, 11)), planner.match("r1", 0, 40, 0.0), 0.0)
        orders = planner.step([], 0.0)
        assert pool.kept == {"transfer:t"}
        planner.apply(loaded(orders), 0.1)
        assert pool.kept == set()


class TestHints:
    def test_sent_once_at_the_end_with_the_whole_chain(self, planner, pool, make_info):
        planner.add(make_info(40, transfer_id="t", leg="prefill", session="over"))
        planner.match("r1", 0, 40, 0.0)
        planner.finish("r1", completed=True)
        assert not pool.hints
        planner.add(make_info(40, "r2", transfer_id="t", leg="decode", session="over"))
        planner.match("r2", 0, 40, 0.0)
        planner.finish("r2", completed=True)
        assert pool.hints == [(keys(40), "over")]

    def test_none_where_none_was_given(self, planner, pool, make_info):
        planner.add(make_info(40))
        planner.match("r1", 0, 40, 0.0)
        planner.finish("r1", completed=True)
        assert not pool.hints


class TestHoles:
    def test_what_leg_two_does_not_find_is_counted(self, planner, pool, make_info):
        pool.fill(keys(41)[:3])
        planner.add(make_info(41, transfer_id="t", leg="decode", expected_blocks=5))
        planner.allocate("r1", list(range(1, 12)), planner.match("r1", 0, 41, 0.0), 0.0)
        assert planner.take_counts() == {"short_prefix_blocks": 2}

    def test_a_prefill_leg_was_promised_nothing(self, planner, make_info):
        planner.add(make_info(41, transfer_id="t", leg="prefill", expected_blocks=5))
        planner.allocate("r1", list(range(1, 12)), planner.match("r1", 0, 41, 0.0), 0.0)
        assert planner.take_counts() == {}


def test_tenant_is_the_salt(planner, make_info):
    for request_id, salt in (("r1", "tenant-a"), ("r2", None)):
        planner.add(make_info(40, request_id, cache_salt=salt))
        planner.match(request_id, 0, 40, 0.0)
        planner.allocate(request_id, list(range(1, 11)), 0, 0.0)
        part = Scheduled(request_id, 0, 40, list(range(1, 11)), replaces_blocks=True)
        (order,) = planner.step([part], 0.0).stores
        assert order.tenant == (salt or "")


def learn_steps(planner, make_info, *, seconds_a_token):
    """The planner sees what a prefill of 80 tokens takes."""
    planner.add(make_info(80, "teacher", cache_salt="teacher"))
    planner.match("teacher", 0, 80, 10.0)
    planner.allocate("teacher", list(range(1, 21)), 0, 10.0)
    part = Scheduled("teacher", 0, 80, list(range(1, 21)), replaces_blocks=True)
    orders = planner.step([part], 10.0)
    planner.apply(StepResults(steps=[orders.number]), 10.0 + 80 * seconds_a_token)
    planner.finish("teacher", completed=True)


def loaded(orders):
    return StepResults(
        [LoadResult(o.request_id, o.attempt, loaded_blocks=len(o.blocks)) for o in orders.loads]
    )
