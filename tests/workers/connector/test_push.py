"""Leg 1 has its agent push its blocks to leg 2's node, from the moment when it is allocated."""

from __future__ import annotations

from workers.core.hashing import block_hashes, root_hash
from workers.core.transfer_messages import HolderRef

TARGET = HolderRef("n2", "tcp:10.0.0.2:7710", 7)


def test_once_when_it_runs(make_planner, pool, make_info):
    planner = make_planner()
    planner.add(make_info(40, target=TARGET, transfer_id="t", leg="prefill", cache_salt="acme"))
    assert planner.match("r1", 0, 40, 0.0) == 0
    assert not pool.pushes, "it may wait for long"
    planner.allocate("r1", list(range(5)), 0, 0.1)
    planner.allocate("r1", list(range(5)), 0, 0.2)
    chain = block_hashes(root_hash(b"n" * 32, "acme", None), list(range(100, 140)), 8)
    assert pool.pushes == [("transfer:t", chain, "n2", "acme")]


def test_nothing_of_a_decode_leg_or_without_a_target(make_planner, pool, make_info):
    planner = make_planner()
    planner.add(make_info(40, target=TARGET, transfer_id="t", leg="decode"))
    planner.match("r1", 0, 40, 0.0)
    planner.allocate("r1", list(range(5)), 0, 0.1)
    assert not pool.pushes
