"""Stores where the pool has no room, or no time: steps go on, blocks come later, holes count."""

from __future__ import annotations

import signal
import time

import pytest
from connector_halves import BLOCK, TOKENS, WAIT, holds, until

from workers.client import AgentClient, make_hello
from workers.core.hashing import block_hashes, namespace_digest, root_hash

LEG_1 = {"transfer_id": "t", "leg": "prefill"}
LEG_2 = {"transfer_id": "t", "leg": "decode", "num_blocks": 5}


def keys_of(engine, tokens, salt=None):
    namespace = namespace_digest(engine.worker.namespace_spec)
    return block_hashes(root_hash(namespace, salt, None), tokens, BLOCK)


@pytest.fixture
def other(make_halves_agent):
    """Another worker of the same namespace, by hand."""
    made = []

    def make(agent, engine):
        hello = make_hello("worker", "other", namespace=engine.worker.namespace_spec)
        client = AgentClient(str(agent.socket), hello, 20.0)
        client.connect()
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


def counts_of(engine, seen):
    for name, count in engine.worker.take_counts().items():
        seen[name] = seen.get(name, 0) + count
    return seen


class TestFullQueue:
    def test_b43_refused_blocks_come_when_there_is_room(
        self, make_halves_agent, make_engine_at, other
    ):
        """The queue holds two blocks; another worker fills it and takes its time."""
        agent = make_halves_agent("--write-queue-blocks", "2")
        engine = make_engine_at(agent)
        hog = other(agent, engine)
        namespace = namespace_digest(engine.worker.namespace_spec)
        taken = hog.prepare_store("store:hog", namespace, b"", keys_of(engine, TOKENS, "hog"))
        assert taken.num_refused == 3
        _, reply, _ = engine.run(TOKENS, params=LEG_1)
        assert reply["perilune"]["num_blocks"] == 0  # nothing is promised that is not there
        seen = counts_of(engine, {})
        assert seen["store_refused_blocks"] + seen.get("store_dropped_blocks", 0) == 5
        assert seen["store_queue_alarms"] == 1
        hog.complete_store("store:hog", [], [ref for ref in taken.slots if ref])
        stored = seen["store_refused_blocks"]
        until(lambda: agent.stats().stored_blocks_total == stored, "the blocks kept meanwhile")
        assert stored == 2  # no more than the pool's own bound is kept
        until(lambda: counts_of(engine, seen).get("store_retried_blocks") == 2, "its count")
        assert seen["store_holes"] == 1
        until(lambda: not engine.worker._storer.backlog.num_blocks, "an empty backlog")
        hog.release("store:hog")
        until(lambda: not [o for o in [agent.stats().pinned_blocks] if o], "no pin of the retry")

    def test_a_pool_full_of_pins_gets_its_blocks_when_they_end(
        self, make_halves_agent, make_engine_at, other
    ):
        agent = make_halves_agent("--write-queue-blocks", "10000")
        engine = make_engine_at(agent)
        hog = other(agent, engine)
        namespace = namespace_digest(engine.worker.namespace_spec)
        capacity = agent.stats().capacity_blocks
        many = keys_of(engine, list(range(BLOCK * capacity)), "hog")
        taken = hog.prepare_store("store:hog", namespace, b"", many)
        assert taken.num_refused == 0
        engine.run(TOKENS)
        seen = counts_of(engine, {})
        assert seen["store_refused_blocks"] == 5
        hog.complete_store("store:hog", [], [ref for ref in taken.slots if ref])
        hog.release("store:hog")
        until(lambda: agent.stats().stored_blocks_total == 5, "the blocks kept meanwhile")
        external, _, _ = engine.run(TOKENS, "again", first_block=20)
        assert external == 40
        assert holds(engine.cache, TOKENS, 20, 41)
        assert "store_holes" not in counts_of(engine, seen)

    def test_b43_what_never_finds_room_is_a_hole_and_counted(
        self, make_halves_agent, make_engine_at, other
    ):
        agent = make_halves_agent("--write-queue-blocks", "10000")
        engine = make_engine_at(agent, settings={"store_retry_seconds": 0.2})
        hog = other(agent, engine)
        namespace = namespace_digest(engine.worker.namespace_spec)
        many = keys_of(engine, list(range(BLOCK * agent.stats().capacity_blocks)), "hog")
        hog.prepare_store("store:hog", namespace, b"", many)
        engine.run(TOKENS)
        seen = {}
        until(lambda: counts_of(engine, seen).get("store_holes"), "the hole")
        assert seen["store_expired_blocks"] == 5
        assert engine.worker._storer.backlog.num_blocks == 0

    def test_a_later_part_waits_behind_the_kept_one(self, make_halves_agent, make_engine_at, other):
        """Of one chain nothing goes to the pool before what comes first."""
        agent = make_halves_agent("--write-queue-blocks", "8")
        engine = make_engine_at(agent)
        hog = other(agent, engine)
        namespace = namespace_digest(engine.worker.namespace_spec)
        taken = hog.prepare_store(
            "store:hog", namespace, b"", keys_of(engine, list(range(64)), "hog")
        )
        assert taken.num_refused == 0
        engine.run(TOKENS[:17])
        engine.run(TOKENS, "r2")  # the same prompt, longer
        hog.complete_store("store:hog", [], [ref for ref in taken.slots if ref])
        until(lambda: hog.lookup(namespace, keys_of(engine, TOKENS)).num_held == 5, "the chain")


class TestSlowAgent:
    def test_a_stopped_agent_holds_no_step(self, halves_agent, make_engine):
        """And what it answers when it goes on is used."""
        engine = make_engine(settings={"store_step_seconds": 0.005})
        engine.run(TOKENS[:9], "warm")
        until(lambda: halves_agent.stats().stored_blocks_total == 1, "the first block")
        request, orders = engine.begin(TOKENS, "r2")
        halves_agent.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            engine.worker.store(orders)
            took = time.monotonic() - began
            counts = engine.worker.take_counts()
        finally:
            halves_agent.signal(signal.SIGCONT)
        # It may wait 5 ms; the bound here is for a machine that has other things to do.
        assert took < engine.settings.store_timeout_seconds / 2
        assert counts["store_refused_blocks"] == len(orders.stores[0].block_hashes)
        until(lambda: halves_agent.stats().stored_blocks_total == 5, "the late blocks")
        engine.scheduler.finish(request)
        until(lambda: not halves_agent.stats().num_owners, "pins that stay")

    def test_a_late_answer_tells_how_full_the_queue_is(self, make_halves_agent, make_engine_at):
        agent = make_halves_agent("--write-queue-blocks", "8")
        engine = make_engine_at(agent, settings={"store_step_seconds": 0.005})
        _, orders = engine.begin(TOKENS, "r")
        agent.signal(signal.SIGSTOP)
        try:
            engine.worker.store(orders)
        finally:
            agent.signal(signal.SIGCONT)
        until(lambda: engine.worker._storer.queue_share == 5 / 8, "the queue as it was then")

    def test_no_agent_keeps_nothing(self, halves_agent, make_engine):
        engine = make_engine()
        halves_agent.kill()
        until(lambda: engine.worker._session.welcome is None, "the loss to be noticed")
        engine.run(TOKENS)
        counts = engine.worker.take_counts()
        assert counts["store_dropped_blocks"] == 5
        assert engine.worker._storer.backlog.num_blocks == 0


class TestLeases:
    def test_b02_a_read_longer_than_the_lease_is_not_lost(self, make_halves_agent, make_engine_at):
        agent = make_halves_agent("--lease-seconds", "1.0")
        engine = make_engine_at(agent, "p1", "kv_both")
        engine.run(TOKENS)
        until(lambda: agent.stats().stored_blocks_total == 5, "stores")
        request, orders = engine.begin(TOKENS, "slow", first_block=20)
        assert len(orders.loads[0].blocks) == 5
        time.sleep(3.0)  # three leases: the engine is busy with something else
        assert agent.stats().pinned_blocks == 5
        assert agent.stats().leases_expired_total == 0
        engine.load(orders)
        assert holds(engine.cache, TOKENS, 20, 40)
        engine.scheduler.apply(engine.worker.take_results())
        engine.scheduler.finish(request)
        until(lambda: not agent.stats().num_owners, "pins that stay")

    def test_b03_a_wait_longer_than_the_lease_keeps_what_leg_one_pinned(
        self, make_halves_agent, make_engine_at
    ):
        agent = make_halves_agent("--lease-seconds", "1.0")
        prefill = make_engine_at(agent)
        decode = make_engine_at(agent, "d1", "kv_consumer")
        prefill.run(TOKENS, params=LEG_1)
        request = decode.request(TOKENS, "waits", LEG_2)
        decode.scheduler.add(request)
        until(lambda: agent.stats().stored_blocks_total == 5, "stores")
        time.sleep(3.0)
        assert agent.stats().pinned_blocks == 5
        decode.scheduler.finish(request)
        until(lambda: agent.stats().pinned_blocks == 0, "the lease's end", WAIT)


class TestPins:
    def test_b05_lookups_without_a_read_pin_nothing(self, halves_agent, make_engine):
        engine = make_engine("p1", "kv_both")
        engine.run(TOKENS)
        until(lambda: halves_agent.stats().stored_blocks_total == 5, "stores")
        for number in range(300):
            request = engine.request(TOKENS, f"r{number}")
            engine.scheduler.add(request)
            assert engine.scheduler.match(request, 40) == 0  # the device has it all
            assert engine.scheduler.match(request, 0) == 40
            engine.scheduler.finish(request)
        stats = until(lambda: (s := halves_agent.stats()).num_owners == 0 and s, "no owners")
        assert stats.pinned_blocks == 0
        # All of the pool can be had by others.
        more = list(range(1000, 1000 + BLOCK * stats.capacity_blocks))
        hashes = keys_of(engine, more, "next")
        reply = engine.worker._session._client.prepare_store(
            "store:next", namespace_digest(engine.worker.namespace_spec), b"", hashes[:400]
        )
        assert reply.num_refused == len(hashes[:400]) - len([ref for ref in reply.slots if ref])
        assert reply.slots[0] is not None
