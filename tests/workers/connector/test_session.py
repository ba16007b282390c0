"""A connection that is there or not: misses are quick, healing is nobody's work, leases last."""

from __future__ import annotations

import time

import pytest
from connector_halves import TOKENS, WAIT, Agent, Engine, until

from workers.client import make_hello
from workers.connector.session import AgentSession
from workers.core.hashing import namespace_digest
from workers.core.messages import Lookup, LookupReply


@pytest.fixture
def make_session():
    made = []

    def make(address, **changes):
        session = AgentSession(
            str(address), make_hello("cli", "test"), **({"call_timeout_seconds": 5.0} | changes)
        )
        session.start()
        made.append(session)
        return session

    yield make
    for session in made:
        session.close()


class TestNotReady:
    def test_b42_an_agent_that_comes_late_is_a_quick_miss_and_then_found(self, tmp_path):
        """Worker first, agent later: requests in between compute."""
        agent = Agent(tmp_path)
        engine = Engine(agent, "p1", "kv_both", settings={"start_timeout_seconds": 0.05})
        try:
            engine.start_without_agent()
            for number in range(5):
                began = time.monotonic()
                external, _, _ = engine.run(TOKENS, f"r{number}")
                # No question goes out; the bound is for a machine that has other things to do.
                assert time.monotonic() - began < 2.0
                assert external == 0
            agent.start()
            until(lambda: engine.worker._session.welcome, "the agent to be found")
            until(lambda: engine.scheduler._session.welcome, "the agent to be found")
            engine.run(TOKENS, "first")
            until(lambda: agent.stats().stored_blocks_total == 5, "stores")
            assert engine.run(TOKENS, "second", first_block=20)[0] == 40
        finally:
            engine.stop()
            agent.stop()

    def test_calls_without_an_agent_return_at_once(self, make_session, tmp_path):
        session = make_session(tmp_path / "nobody.sock")
        assert session.call(Lookup(b"", []), LookupReply) is None
        assert session.call_many([Lookup(b"", [])], LookupReply) is None
        assert session.try_many([Lookup(b"", [])], LookupReply, 0.1, print) is None
        assert session.welcome is None


class TestCalls:
    def test_many_questions_in_one(self, halves_agent, make_session):
        session = make_session(halves_agent.socket)
        until(lambda: session.welcome, "the handshake")
        replies = session.call_many([Lookup(b"n" * 32, [b"k" * 16])] * 50, LookupReply)
        assert replies == [LookupReply(0)] * 50

    def test_leases_of_all_owners_are_renewed(self, make_halves_agent, make_engine_at):
        agent = make_halves_agent("--lease-seconds", "0.9")
        engine = make_engine_at(agent, "p1", "kv_both")
        engine.run(TOKENS)
        until(lambda: agent.stats().stored_blocks_total == 5, "stores")
        pool = engine.scheduler._planner._pool
        keys = engine.scheduler._planner._requests  # nothing is left of the request
        assert not keys
        request, _ = engine.begin(TOKENS, "r2", first_block=20)
        assert pool.owners() == ("load:p1:r2",)
        time.sleep(2.0)
        assert agent.stats().pinned_blocks == 5
        engine.scheduler.finish(request)
        assert pool.owners() == ()
        until(lambda: agent.stats().pinned_blocks == 0, "the release")

    def test_hints_reach_the_agent(self, halves_agent, make_engine):
        """And harm nothing: the next question is answered."""
        engine = make_engine("p1", "kv_both")
        engine.run(TOKENS, params={"transfer_id": "t", "session": "over"})
        until(lambda: halves_agent.stats().stored_blocks_total == 5, "stores")
        namespace = namespace_digest(engine.worker.namespace_spec)
        assert engine.scheduler._session.call(Lookup(namespace, []), LookupReply, WAIT)
        assert engine.scheduler._session.welcome is not None
