"""Blocks that another node holds: asked for once, waited for while they come, bounded."""

from __future__ import annotations

import pytest

from workers.core.hashing import block_hashes, root_hash
from workers.core.messages import SlotRef
from workers.core.transfer_messages import HolderRef

NAMESPACE = b"n" * 32
BLOCK = 8
HOLDER = HolderRef("n2", "tcp:10.0.0.2:7710", 5)


def keys(num_tokens, salt=None):
    tokens = list(range(100, 100 + num_tokens))
    return block_hashes(root_hash(NAMESPACE, salt, None), tokens, BLOCK)


@pytest.fixture
def planner(make_planner):
    planner = make_planner()
    yield planner
    planner.check_integrity()


@pytest.fixture
def add(planner, make_info):
    def add(num_tokens=40, blocks=4, **changes):
        fields = {"expected_blocks": blocks, "holder": HOLDER, "transfer_id": "t", "leg": "decode"}
        planner.add(make_info(num_tokens, **{**fields, **changes}))

    return add


def test_asks_once_and_waits_until_they_are_there(planner, pool, add):
    add(cache_salt="acme")
    for step in range(5):
        assert planner.match("r1", 0, 40, step * 0.05) is None
    chain = keys(40, "acme")[:4]
    assert pool.fetches == [("load:w1:r1#t", chain, "n2", "acme")]
    pool.complete(pool.coming)
    assert planner.match("r1", 0, 40, 0.5) == 32
    assert planner.take_counts()["fetches"] == 1


def test_what_is_here_already_is_not_asked_for(planner, pool, add):
    pool.fill(keys(40)[:4])
    add()
    assert planner.match("r1", 0, 40, 0.0) == 32
    assert not pool.fetches


def test_only_what_is_missing_is_awaited(planner, pool, add):
    pool.fill(keys(40)[:2])
    add()
    assert planner.match("r1", 0, 40, 0.0) is None
    assert len(pool.coming) == 2
    pool.complete(pool.coming)
    assert planner.match("r1", 0, 40, 0.1) == 32


def test_a_fetch_that_fails_leaves_what_is_here(planner, pool, add):
    pool.fill(keys(40)[:1])
    add()
    assert planner.match("r1", 0, 40, 0.0) is None
    failed = [SlotRef(ref.slot, ref.generation) for ref in pool.coming]
    pool.state.complete_store(0.0, [], failed)
    assert planner.match("r1", 0, 40, 0.1) == 8


def test_nothing_under_way_is_nothing_to_wait_for(planner, pool, add):
    pool.fetchable = False
    add()
    assert planner.match("r1", 0, 40, 0.0) == 0
    assert planner.match("r1", 0, 40, 0.1) == 0
    assert len(pool.fetches) == 1


def test_no_agent_is_a_miss(planner, pool, add):
    pool.down = True
    add()
    assert planner.match("r1", 0, 40, 0.0) == 0


def test_the_wait_is_bounded(make_planner, pool, make_info):
    planner = make_planner(load_timeout_seconds=1.0)
    planner.add(make_info(40, expected_blocks=4, holder=HOLDER, transfer_id="t", leg="prefill"))
    assert planner.match("r1", 0, 40, 0.0) is None
    assert planner.match("r1", 0, 40, 0.9) is None
    assert planner.match("r1", 0, 40, 1.1) == 0
    assert planner.take_counts()["fetches_given_up"] == 1


def test_a_prompt_without_a_holder_asks_nobody(planner, pool, add):
    add(holder=None)
    assert planner.match("r1", 0, 40, 0.0) == 0
    assert not pool.fetches


def test_what_the_device_has_is_not_waited_for(planner, pool, add):
    add()
    assert planner.match("r1", 32, 40, 0.0) == 0
    assert not pool.fetches


def test_the_report_names_the_wire(planner, pool, add):
    add()
    assert planner.match("r1", 0, 40, 1.0) is None
    pool.complete(pool.coming)
    assert planner.match("r1", 0, 40, 1.25) == 32
    planner.allocate("r1", list(range(10)), 32, 1.25)
    planner.finish("r1", completed=True)
    (report,) = pool.reports
    assert report.kv_wait_by_stage_seconds["wire"] == pytest.approx(0.25)
    assert report.kv_wait_by_stage_seconds["queue"] == pytest.approx(0.0)


def test_a_requests_class_is_told_once_and_only_where_there_is_one(planner, pool, add, make_info):
    add(label="report")
    planner.add(make_info(40, "r1", label="report", transfer_id="t"))
    planner.add(make_info(40, "r2", transfer_id="u"))
    assert pool.labels == [("t", "report")]
