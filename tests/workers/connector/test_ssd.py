"""Both halves, a real agent and its SSD tier: what was demoted comes back, verified."""

from __future__ import annotations

import pytest
from connector_halves import BLOCK, TOKENS, holds, until

from workers.core.hashing import block_hashes, namespace_digest, root_hash

LEG_1 = {"transfer_id": "t", "leg": "prefill"}
LEG_2 = {"transfer_id": "t", "leg": "decode", "num_blocks": 5}


@pytest.fixture
def tiered(make_halves_agent, tmp_path):
    return make_halves_agent("--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", str(64 << 20))


def ssd(agent):
    return next((tier for tier in agent.stats().tiers if tier.tier == "ssd"), None)


def demote(agent, engine):
    """Other chains until nothing of ours is left in memory."""
    namespace = namespace_digest(engine.worker.namespace_spec)
    keys = block_hashes(root_hash(namespace, None, None), TOKENS, BLOCK)

    def on_disk():
        reply = agent.client.lookup(namespace, keys)
        return reply.num_held == 0 and reply.num_on_disk == 5

    for number in range(200):
        if on_disk():
            return
        stored = agent.stats().stored_blocks_total
        engine.run(list(range(BLOCK * 16)), f"fill{number}", cache_salt=f"fill{number}")
        until(lambda stored=stored: agent.stats().stored_blocks_total > stored, "stores")
    until(on_disk, "the demotion")


class TestPromotion:
    def test_a_demoted_chain_is_promoted_and_read(self, tiered, make_engine_at):
        engine = make_engine_at(tiered, "p1", "kv_both")
        engine.run(TOKENS)
        until(lambda: tiered.stats().stored_blocks_total == 5, "stores")
        until(lambda: (tier := ssd(tiered)) and tier.capacity_blocks > 300, "the file's size")
        demote(tiered, engine)
        reads = ssd(tiered).read_blocks_total
        external, _, spoiled = engine.run(TOKENS, "again", first_block=25)
        assert external == 40
        assert not spoiled
        assert holds(engine.cache, TOKENS, 25, 41)
        assert ssd(tiered).read_blocks_total - reads >= 5
        counts = engine.scheduler.take_counts()
        assert counts.get("promoted_blocks", 5) == 5  # or they were there before it could wait
        until(lambda: not tiered.stats().num_owners, "pins that stay")

    def test_leg_two_has_what_leg_one_left_on_ssd(self, tiered, make_engine_at):
        prefill = make_engine_at(tiered)
        decode = make_engine_at(tiered, "d1", "kv_consumer")
        prefill.run(TOKENS)
        until(lambda: tiered.stats().stored_blocks_total == 5, "stores")
        until(lambda: (tier := ssd(tiered)) and tier.capacity_blocks > 300, "the file's size")
        demote(tiered, prefill)
        external, _, _ = decode.run(TOKENS, first_block=7, params=LEG_2)
        assert external == 40
        assert holds(decode.cache, TOKENS, 7, 41)

    def test_b04_an_abort_while_promoting_leaves_no_pin(self, tiered, make_engine_at):
        engine = make_engine_at(tiered, "p1", "kv_both")
        engine.run(TOKENS)
        until(lambda: tiered.stats().stored_blocks_total == 5, "stores")
        until(lambda: (tier := ssd(tiered)) and tier.capacity_blocks > 300, "the file's size")
        demote(tiered, engine)
        for number in range(10):
            request = engine.request(TOKENS, f"abort{number}")
            engine.scheduler.add(request)
            engine.scheduler.match(request, 0)
            engine.scheduler.finish(request)
        until(lambda: not tiered.stats().num_owners, "pins that stay")
        assert engine.run(TOKENS, "normal", first_block=25)[0] == 40
