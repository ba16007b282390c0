"""Both halves, a real agent and its SSD tier: what was demoted comes back, verified."""

from __future__ import annotations

import itertools
import time

import pytest
from connector_halves import BLOCK, TOKENS, WAIT, holds, until

from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import LookupReply

PATIENT = {"promote_timeout_seconds": WAIT, "load_timeout_seconds": WAIT}
LEG_1 = {"transfer_id": "t", "leg": "prefill"}
LEG_2 = {"transfer_id": "t", "leg": "decode", "num_blocks": 5}


@pytest.fixture
def tiered(make_halves_agent, tmp_path):
    return make_halves_agent("--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", str(64 << 20))


def ssd(agent):
    return next((tier for tier in agent.stats().tiers if tier.tier == "ssd"), None)


def demote(agent, engine):
    """Other chains until nothing of ours is left in memory, and all of it on SSD.

    A disk that does not keep up loses blocks instead of demoting them: they are stored once more.
    """
    namespace = namespace_digest(engine.worker.namespace_spec)
    keys = block_hashes(root_hash(namespace, None, None), TOKENS, BLOCK)
    deadline = time.monotonic() + 2 * WAIT
    for number in itertools.count():
        found = agent.client.lookup(namespace, keys)
        if found == LookupReply(0, 0, 5):
            return
        assert time.monotonic() < deadline, found
        if found.num_held + found.num_on_disk < 5:
            engine.run(TOKENS, f"again{number}")
        agent.client.hint(namespace, keys, "over")  # the first to go
        engine.run(list(range(BLOCK * 8)), f"fill{number}", cache_salt=f"fill{number}")
        settle(agent)


def settle(agent):
    """Until the pool's writes and the disk's have been still for a moment."""
    seen, still = None, 0
    deadline = time.monotonic() + WAIT
    while still < 3 and time.monotonic() < deadline:
        stats = agent.stats()
        now = (stats.write_queue_blocks, stats.stored_blocks_total, ssd(agent).written_blocks_total)
        still = still + 1 if now == seen else 0
        seen = now
        time.sleep(0.005)


@pytest.fixture
def demoted(tiered, make_engine_at):
    """A chain that lies on SSD only."""
    writer = make_engine_at(tiered)
    writer.run(TOKENS)
    until(lambda: tiered.stats().stored_blocks_total == 5, "stores")
    until(lambda: (tier := ssd(tiered)) and tier.capacity_blocks > 300, "the file's size")
    demote(tiered, writer)


@pytest.fixture
def reader(tiered, make_engine_at, demoted):
    """An engine that has not computed anything yet: it knows no reason not to promote."""

    return make_engine_at(tiered, "p2", "kv_both", settings=PATIENT)


class TestPromotion:
    @pytest.mark.parametrize("params", [None, LEG_2])
    def test_a_demoted_chain_is_promoted_and_read(self, tiered, reader, params):
        reads = ssd(tiered).read_blocks_total
        external, _, spoiled = reader.run(TOKENS, first_block=7, params=params)
        assert external == 40
        assert not spoiled
        assert holds(reader.cache, TOKENS, 7, 41)
        assert ssd(tiered).read_blocks_total - reads >= 5
        assert reader.scheduler.take_counts().get("promoted_blocks", 5) == 5
        until(lambda: not tiered.stats().num_owners, "pins that stay")

    def test_b04_an_abort_while_promoting_leaves_no_pin(self, tiered, reader):
        for number in range(10):
            request = reader.request(TOKENS, f"abort{number}")
            reader.scheduler.add(request)
            reader.scheduler.match(request, 0)
            reader.scheduler.finish(request)
        until(lambda: not tiered.stats().num_owners, "pins that stay")
        assert reader.run(TOKENS, "normal", first_block=25)[0] == 40

    def test_a_leg_one_that_computes_it_has_it_in_memory_for_leg_two(
        self, tiered, demoted, make_engine_at
    ):
        """To compute is quicker here, by what this engine has seen; leg 2 finds it all the same."""
        prefill = make_engine_at(tiered, "p3")
        decode = make_engine_at(tiered, "d1", "kv_consumer", settings=PATIENT)
        for number in range(3):  # it computes a token in microseconds, and a disk takes longer
            prefill.run(list(range(96)), f"teacher{number}", cache_salt=f"teacher{number}")
        _, reply, _ = prefill.run(TOKENS, first_block=25, params=LEG_1)
        assert reply["perilune"]["num_blocks"] == 5
        external, _, _ = decode.run(TOKENS, first_block=7, params=LEG_2)
        assert external == 40
        assert holds(decode.cache, TOKENS, 7, 41)
