from __future__ import annotations

import pytest

from workers.connector.metadata import LoadResult, StepResults, StoreResult
from workers.connector.planner import Scheduled
from workers.core.hashing import block_hashes, root_hash

NAMESPACE = b"n" * 32
BLOCK = 8


def keys(num_tokens, salt=None, lora=None):
    tokens = list(range(100, 100 + num_tokens))
    return block_hashes(root_hash(NAMESPACE, salt, lora), tokens, BLOCK)


@pytest.fixture
def planner(make_planner):
    planner = make_planner()
    yield planner
    planner.check_integrity()


def admit(planner, info, *, local=0, now=0.0, block_ids=None):
    """What the engine does to start a request; returns the orders of its first step."""
    planner.add(info)
    num_tokens = len(info.prompt_token_ids)
    external = planner.match(info.request_id, local, num_tokens, now)
    assert external is not None
    block_ids = block_ids or list(range(1, 1 + -(-num_tokens // 4)))
    planner.allocate(info.request_id, block_ids, external, now)
    done = local + external
    part = Scheduled(info.request_id, done, num_tokens - done, block_ids, replaces_blocks=True)
    return external, planner.step([part], 0.0)


def loaded(orders, failed=()):
    """The worker half's results for a step's loads; `failed` are indexes in the first load."""
    results = StepResults()
    for order in orders.loads:
        bad = sorted(failed)
        results.loads.append(
            LoadResult(
                order.request_id,
                order.attempt,
                loaded_blocks=len(order.blocks) - len(bad),
                failed_blocks=len(bad),
                first_failed=order.first_block + bad[0] if bad else -1,
            )
        )
    return results


class TestMatch:
    def test_empty_pool_is_a_miss(self, planner, make_info):
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) == 0

    def test_held_prefix_counts_whole_blocks(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) == 24

    def test_never_the_whole_prompt(self, planner, pool, make_info):
        pool.fill(keys(40))
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) == 32

    def test_one_token_past_the_last_block_takes_every_block(self, planner, pool, make_info):
        pool.fill(keys(41))
        planner.add(make_info(41))
        assert planner.match("r1", 0, 41, 0.0) == 40

    def test_shorter_than_a_block_asks_nobody(self, planner, pool, make_info):
        planner.add(make_info(7))
        assert planner.match("r1", 0, 7, 0.0) == 0
        assert pool.num_lookups == 0

    def test_only_what_the_device_lacks(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        planner.add(make_info(40))
        assert planner.match("r1", 12, 40, 0.0) == 12
        assert planner.match("r1", 24, 40, 0.0) == 0
        assert planner.match("r1", 28, 40, 0.0) == 0

    def test_asking_thousands_of_times_is_one_lookup_and_no_pin(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        planner.add(make_info(40))
        for _ in range(1000):
            assert planner.match("r1", 0, 40, 5.0) == 24
        assert pool.num_lookups == 1
        assert pool.state.num_pinned == 0

    def test_an_old_answer_is_asked_for_again(self, planner, pool, make_info):
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 5.0) == 0
        pool.fill(keys(40)[:3])
        assert planner.match("r1", 0, 40, 5.001) == 0
        assert planner.match("r1", 0, 40, 6.0) == 24

    def test_reset_forgets_answers_but_not_the_pool(self, planner, pool, make_info):
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 5.0) == 0
        pool.fill(keys(40)[:3])
        planner.reset_cache()
        assert planner.match("r1", 0, 40, 5.0) == 24

    def test_no_agent_is_a_miss(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        pool.down = True
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) == 0

    def test_unknown_namespace_is_a_miss_until_it_is_known(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        pool.known = False
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) == 0
        pool.known = True
        assert planner.match("r1", 0, 40, 1.0) == 24

    def test_b37_requests_that_skip_the_cache_count_nowhere(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        external, orders = admit(planner, make_info(40, skip=True))
        assert external == 0
        assert orders.stores == ()
        planner.finish("r1", completed=True)
        assert pool.num_lookups == 0
        assert pool.reports == []

    def test_salt_and_lora_separate(self, planner, pool, make_info):
        pool.fill(keys(40, salt="a")[:3])
        planner.add(make_info(40, "plain"))
        planner.add(make_info(40, "other", cache_salt="b"))
        planner.add(make_info(40, "adapter", cache_salt="a", lora="x"))
        planner.add(make_info(40, "same", cache_salt="a"))
        assert planner.match("plain", 0, 40, 0.0) == 0
        assert planner.match("other", 0, 40, 0.0) == 0
        assert planner.match("adapter", 0, 40, 0.0) == 0
        assert planner.match("same", 0, 40, 0.0) == 24


class TestWaiting:
    """Leg 2 meets blocks that leg 1 is still writing."""

    def info(self, make_info):
        return make_info(40, transfer_id="t", leg="decode", expected_blocks=5)

    def test_waits_until_they_are_there(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        refs = pool.begin(keys(40)[2:5], parent=keys(40)[1])
        planner.add(self.info(make_info))
        assert planner.match("r1", 0, 40, 0.0) is None
        pool.complete(refs)
        assert planner.match("r1", 0, 40, 0.5) == 32

    def test_the_wait_is_bounded_and_takes_what_is_there(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        pool.begin(keys(40)[2:5], parent=keys(40)[1])
        planner.add(self.info(make_info))
        assert planner.match("r1", 0, 40, 0.0) is None
        assert planner.match("r1", 0, 40, 1.9) is None
        assert planner.match("r1", 0, 40, 2.1) == 16
        assert planner.match("r1", 0, 40, 2.2) == 16

    def test_lost_blocks_are_not_waited_for(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        planner.add(self.info(make_info))
        assert planner.match("r1", 0, 40, 0.0) == 16

    def test_a_plain_request_does_not_wait(self, planner, pool, make_info):
        pool.begin(keys(40)[:3])
        planner.add(make_info(40))
        assert planner.match("r1", 0, 40, 0.0) == 0

    def test_an_agent_that_dies_meanwhile_ends_the_wait(self, planner, pool, make_info):
        pool.begin(keys(40)[:3])
        planner.add(self.info(make_info))
        assert planner.match("r1", 0, 40, 0.0) is None
        pool.down = True
        assert planner.match("r1", 0, 40, 0.5) == 0

    def test_the_wait_is_reported(self, planner, pool, make_info):
        refs = pool.begin(keys(40)[:4])
        planner.add(self.info(make_info))
        assert planner.match("r1", 0, 40, 0.0) is None
        pool.complete(refs)
        assert planner.match("r1", 0, 40, 0.5) == 32
        planner.allocate("r1", list(range(1, 11)), 32, 0.5)
        planner.apply(loaded(planner.step([], 0.0)), 0.0)
        planner.finish("r1", completed=True)
        (report,) = pool.reports
        assert report.kv_wait_by_stage_seconds["queue"] == pytest.approx(0.5)


class TestLoads:
    def test_order_names_slots_and_pages(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        external, orders = admit(planner, make_info(40))
        assert external == 16
        (order,) = orders.loads
        assert order.first_block == 0
        assert order.incarnation == 7
        assert [block.block_hash for block in order.blocks] == keys(40)[:2]
        assert all(block.slot >= 0 for block in order.blocks)
        pages = [(page.page, page.block_id) for block in order.blocks for page in block.pages]
        assert pages == [(0, 1), (1, 2), (0, 3), (1, 4)]

    def test_pages_on_the_device_are_left_alone(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        external, orders = admit(planner, make_info(40), local=12)
        assert external == 12
        (order,) = orders.loads
        assert order.first_block == 1
        pages = [[(page.page, page.block_id) for page in block.pages] for block in order.blocks]
        assert pages == [[(1, 4)], [(0, 5), (1, 6)]]

    def test_pins_last_from_allocation_to_the_results(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        _, orders = admit(planner, make_info(40))
        assert pool.state.num_pinned == 2
        planner.apply(loaded(orders), 0.0)
        assert pool.state.num_pinned == 0

    def test_leg_one_keeps_its_pins_until_those_of_leg_two_take_over(
        self, planner, pool, make_info
    ):
        pool.fill(keys(40)[:2])
        _, orders = admit(planner, make_info(40, transfer_id="t", leg="prefill"))
        planner.apply(loaded(orders), 0.0)
        assert pool.state.num_pinned == 2
        planner.finish("r1", completed=True)
        assert pool.state.num_pinned == 2
        pool.release("transfer:t")
        assert pool.state.num_pinned == 0

    def test_an_abort_ends_the_pins(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        _, orders = admit(planner, make_info(40))
        planner.finish("r1", completed=False)
        assert pool.state.num_pinned == 0
        planner.apply(loaded(orders), 0.0)  # the step that was under way

    def test_an_abort_before_the_step_leaves_no_order(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        planner.add(make_info(40))
        planner.allocate("r1", list(range(1, 11)), planner.match("r1", 0, 40, 0.0), 0.0)
        planner.finish("r1", completed=False)
        assert planner.step([], 0.0).loads == ()
        assert pool.state.num_pinned == 0

    def test_blocks_lost_since_the_match_are_ordered_as_lost(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        planner.add(make_info(40))
        external = planner.match("r1", 0, 40, 0.0)
        (second,) = pool.prepare_load("probe", keys(40)[1:2])
        pool.release("probe")
        pool.state.report_corrupt(NAMESPACE, keys(40)[1], second.slot, second.generation)
        planner.allocate("r1", list(range(1, 11)), external, 0.0)
        (order,) = planner.step([], 0.0).loads
        assert [block.slot >= 0 for block in order.blocks] == [True, False]

    def test_no_agent_at_allocation_orders_every_block_as_lost(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        planner.add(make_info(40))
        external = planner.match("r1", 0, 40, 0.0)
        pool.down = True
        planner.allocate("r1", list(range(1, 11)), external, 0.0)
        (order,) = planner.step([], 0.0).loads
        assert [block.slot for block in order.blocks] == [-1, -1]

    def test_a_failed_load_is_not_tried_again(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        _, orders = admit(planner, make_info(40))
        spoiled = planner.apply(loaded(orders, failed=[1]), 0.0)
        assert spoiled == set(range(3, 11))
        assert planner.match("r1", 0, 40, 9.0) == 0

    def test_a_failed_load_counts_only_what_was_usable(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        _, orders = admit(planner, make_info(40))
        planner.apply(loaded(orders, failed=[1]), 0.0)
        planner.finish("r1", completed=True)
        planner.step([], 0.0)
        (report,) = pool.reports
        assert (report.pool_hit_tokens, report.computed_tokens) == (8, 32)
        assert (report.loaded_blocks, report.failed_blocks) == (2, 1)

    def test_others_wait_for_unverified_blocks(self, planner, pool, make_info):
        """Same prompt in the same step: the device's cache already lists what r1 loads."""
        pool.fill(keys(40)[:3])
        _, orders = admit(planner, make_info(40))
        planner.add(make_info(40, "r2"))
        assert planner.match("r2", 24, 40, 0.0) is None
        planner.apply(loaded(orders), 0.0)
        assert planner.match("r2", 24, 40, 0.1) == 0

    def test_strangers_do_not_wait(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        admit(planner, make_info(40))
        planner.add(make_info(40, "r2", cache_salt="x"))
        assert planner.match("r2", 24, 40, 0.0) == 0


class TestStores:
    def test_full_blocks_only(self, planner, make_info):
        _, orders = admit(planner, make_info(41))
        (order,) = orders.stores
        assert list(order.block_hashes) == keys(41)
        assert len(order.block_hashes) == 5
        assert order.block_ids == tuple(range(1, 11))
        assert order.parent == b""

    def test_consumers_store_nothing(self, make_planner, make_info):
        _, orders = admit(make_planner(kv_role="kv_consumer"), make_info(41))
        assert orders.stores == ()

    def test_chunks_go_out_as_they_are_computed(self, planner, make_info):
        planner.add(make_info(40))
        planner.match("r1", 0, 40, 0.0)
        planner.allocate("r1", [1, 2, 3, 4, 5], 0, 0.0)
        (one,) = planner.step(
            [Scheduled("r1", 0, 20, [1, 2, 3, 4, 5], replaces_blocks=True)], 0.0
        ).stores
        (two,) = planner.step([Scheduled("r1", 20, 20, [6, 7, 8, 9, 10])], 0.0).stores
        assert list(one.block_hashes) == keys(40)[:2]
        assert one.block_ids == (1, 2, 3, 4)
        assert list(two.block_hashes) == keys(40)[2:]
        assert two.block_ids == (5, 6, 7, 8, 9, 10)
        assert two.parent == keys(40)[1]

    def test_generated_tokens_are_not_stored(self, planner, make_info):
        admit(planner, make_info(40))
        assert planner.step([Scheduled("r1", 40, 1, [11])], 0.0).stores == ()
        assert planner.step([Scheduled("r1", 48, 1, [])], 0.0).stores == ()

    def test_device_hits_are_offered_again(self, planner, make_info):
        """The pool may have lost what the device still caches."""
        _, orders = admit(planner, make_info(40), local=32)
        (order,) = orders.stores
        assert list(order.block_hashes) == keys(40)

    def test_pool_hits_are_not_offered_again(self, planner, pool, make_info):
        pool.fill(keys(40)[:3])
        _, orders = admit(planner, make_info(40))
        (order,) = orders.stores
        assert list(order.block_hashes) == keys(40)[3:]
        assert order.parent == keys(40)[2]

    def test_after_a_failed_load_a_new_attempt_stores_what_is_computed(
        self, planner, pool, make_info
    ):
        pool.fill(keys(40)[:3])
        _, orders = admit(planner, make_info(40))
        planner.apply(loaded(orders, failed=[1]), 0.0)
        (order,) = planner.step([Scheduled("r1", 8, 32)], 0.0).stores
        assert order.attempt == orders.stores[0].attempt + 1
        assert list(order.block_hashes) == keys(40)[1:]
        assert order.block_ids == tuple(range(3, 11))

    def test_resumed_request_has_new_blocks(self, planner, pool, make_info):
        admit(planner, make_info(40))
        assert planner.match("r1", 0, 44, 9.0) == 0
        planner.allocate("r1", list(range(21, 32)), 0, 9.0)
        part = Scheduled("r1", 0, 44, list(range(21, 32)), replaces_blocks=True)
        (order,) = planner.step([part], 0.0).stores
        assert order.block_ids == tuple(range(21, 31))

    def test_owner_is_the_transfer_on_leg_one(self, planner, make_info):
        _, orders = admit(planner, make_info(40, transfer_id="t", leg="prefill"))
        assert orders.stores[0].owner == "transfer:t"
        _, orders = admit(planner, make_info(40, "r2"))
        assert orders.stores[0].owner == "store:w1:r2"


class TestEnds:
    def test_leg_one_says_what_leg_two_will_find(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        _, orders = admit(planner, make_info(40, transfer_id="t", leg="prefill"))
        planner.apply(loaded(orders), 0.0)
        pool.begin(keys(40)[2:], parent=keys(40)[1])
        reply = planner.finish("r1", completed=True)
        assert reply == {
            "perilune": {
                "transfer_id": "t",
                "num_blocks": 5,
                "device_hit_tokens": 0,
                "pool_hit_tokens": 16,
            }
        }
        assert pool.state.num_pinned == 5

    def test_an_aborted_leg_one_pins_nothing(self, planner, pool, make_info):
        pool.fill(keys(40)[:2])
        _, orders = admit(planner, make_info(40, transfer_id="t", leg="prefill"))
        planner.apply(loaded(orders), 0.0)
        assert planner.finish("r1", completed=False) is None
        assert pool.state.num_pinned == 0

    def test_report_adds_up(self, planner, pool, make_info):
        pool.fill(keys(41)[:4])
        _, orders = admit(planner, make_info(41, transfer_id="t", leg="prefill"), local=16)
        results = loaded(orders)
        results.stores.append(StoreResult("r1", stored_blocks=1, stored_bytes=10))
        planner.apply(results, 0.0)
        planner.finish("r1", completed=True)
        (report,) = pool.reports
        assert report.transfer_id == "t"
        assert report.device_hit_tokens == 16
        assert report.pool_hit_tokens == 16
        assert report.computed_tokens == 9
        assert (report.stored_blocks, report.stored_bytes) == (1, 10)

    def test_what_the_last_step_stored_is_in_the_report(self, planner, pool, make_info):
        _, orders = admit(planner, make_info(41, transfer_id="t", leg="prefill"))
        planner.finish("r1", completed=True)
        assert pool.reports == []
        results = loaded(orders)
        results.stores.append(StoreResult("r1", stored_blocks=5, stored_bytes=50))
        planner.apply(results, 0.0)
        (report,) = pool.reports
        assert (report.stored_blocks, report.stored_bytes) == (5, 50)
        planner.step([], 0.0)
        assert len(pool.reports) == 1

    def test_a_store_without_a_word_delays_a_report_by_one_step(self, planner, pool, make_info):
        admit(planner, make_info(41, transfer_id="t", leg="prefill"))
        planner.finish("r1", completed=True)
        planner.step([], 0.0)
        assert len(pool.reports) == 1

    def test_a_request_that_never_ran_is_not_reported(self, planner, pool, make_info):
        planner.add(make_info(40))
        planner.finish("r1", completed=False)
        assert pool.reports == []

    def test_nothing_is_left(self, planner, pool, make_info):
        for index in range(100):
            info = make_info(40, f"r{index}")
            _, orders = admit(planner, info, now=float(index))
            if index % 3:
                planner.apply(loaded(orders), 0.0)
            planner.finish(info.request_id, completed=bool(index % 2))
        assert planner.num_requests() == 0
        assert pool.state.num_pinned == 0

    def test_a_second_finish_is_harmless(self, planner, make_info):
        admit(planner, make_info(40))
        planner.finish("r1", completed=True)
        assert planner.finish("r1", completed=True) is None
