"""Both halves against a real node agent, with plain tensors for the engine's cache."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from connector_halves import (
    BLOCK,
    LAYERS,
    TOKENS,
    Engine,
    fake_output,
    fake_request,
    holds,
    until,
)

from workers.connector.metadata import StepOrders
from workers.connector.planner import RequestInfo
from workers.connector.scheduler_half import media_extras, request_info, scheduled_of
from workers.core.errors import RefusedError


@pytest.fixture
def agent(halves_agent):
    return halves_agent


LEG_1 = {"transfer_id": "t", "leg": "prefill"}
LEG_2 = {"transfer_id": "t", "leg": "decode", "num_blocks": 5}


class TestHalves:
    def test_two_legs_move_the_blocks_and_leave_no_pin(self, agent, make_engine):
        prefill, decode = make_engine(), make_engine("d1", "kv_consumer")
        external, reply, _ = prefill.run(TOKENS, params=LEG_1)
        assert external == 0
        assert reply["perilune"]["num_blocks"] == 5
        external, reply, spoiled = decode.run(TOKENS, first_block=7, params=LEG_2)
        assert external == 40
        assert reply is None
        assert not spoiled
        assert holds(decode.cache, TOKENS, 7, 41)
        agent.client.release("transfer:t")
        until(lambda: not agent.stats().num_owners, "pins that stay")
        stats = until(
            lambda: (s := agent.stats()).prompt_tokens_total and s.loaded_blocks_total and s,
            "reports",
        )
        assert stats.stored_blocks_total == 5
        assert stats.loaded_blocks_total == 5

    def test_a_request_past_the_gateway_leaves_no_pin_either(self, agent, make_engine):
        prefill = make_engine()
        prefill.run(TOKENS)
        until(lambda: agent.stats().stored_blocks_total == 5, "stores")
        external, _, _ = prefill.run(TOKENS, "r2", first_block=20)
        assert external == 40
        until(lambda: not agent.stats().num_owners, "pins that stay")

    def test_blocks_under_no_transfer_that_are_held_already_are_unpinned(self, agent, make_engine):
        first, second = make_engine(), make_engine("p2")
        first.run(TOKENS)
        until(lambda: agent.stats().stored_blocks_total == 5, "stores")
        second.scheduler.reset_cache()
        second.run(TOKENS, "r2")
        until(lambda: not agent.stats().num_owners, "pins that stay")

    def test_a_damaged_block_is_named_and_leaves_the_pool(self, agent, make_engine):
        prefill, decode = make_engine(), make_engine("d1", "kv_consumer")
        prefill.run(TOKENS, params=LEG_1)
        until(lambda: agent.stats().stored_blocks_total == 5, "stores")
        slots = decode.worker._slots
        for slot in range(agent.stats().capacity_blocks):
            header = slots._slab.read_header(slot)
            if header is not None:
                slots.payload(slot)[17] ^= 0xFF
                break
        _, _, spoiled = decode.run(TOKENS, first_block=7, params=LEG_2)
        assert len(spoiled) == 2  # one pool block, two engine blocks
        until(lambda: agent.stats().corrupt_total == 1, "the report")

    def test_an_agents_restart_is_survived(self, agent, make_engine):
        prefill, decode = make_engine(), make_engine("d1", "kv_consumer")
        prefill.run(TOKENS, params=LEG_1)
        agent.kill()
        until(lambda: decode.scheduler._session.welcome is None, "the lost agent to be noticed")
        external, _, _ = decode.run(TOKENS, first_block=7)
        assert external == 0
        _, reply, _ = prefill.run(TOKENS, "r2", params=LEG_1)
        assert reply["perilune"]["num_blocks"] == 0
        agent.start()
        for engine in (prefill, decode):
            until(lambda engine=engine: engine.scheduler._session.welcome, "scheduler half")
            until(lambda engine=engine: engine.worker._session.welcome, "worker half")
        _, reply, _ = prefill.run(TOKENS, "r3", params=LEG_1)
        assert reply["perilune"]["num_blocks"] == 5
        external, _, spoiled = decode.run(TOKENS, "r4", first_block=20, params=LEG_2)
        assert external == 40
        assert not spoiled
        assert holds(decode.cache, TOKENS, 20, 41)

    def test_slots_of_a_former_agent_are_not_read(self, agent, make_engine):
        prefill = make_engine("p1", "kv_both")
        prefill.run(TOKENS)
        until(lambda: agent.stats().stored_blocks_total == 5, "stores")
        request = fake_request(TOKENS, "r2")
        prefill.scheduler.add(request)
        assert prefill.scheduler.match(request, 0) == 40
        prefill.scheduler.allocate(
            request, SimpleNamespace(get_block_ids=lambda: (list(range(20, 31)),)), 40
        )
        orders = prefill.scheduler.step(fake_output("r2", 40, 41, list(range(20, 31))))
        agent.kill()
        agent.start()
        former = orders.loads[0].incarnation
        until(lambda: (s := prefill.worker._slots) and s.incarnation != former, "new slab")
        prefill.worker.start_loads(StepOrders(orders.loads))
        prefill.worker.finish_loads()
        assert prefill.worker.take_spoiled() == set(range(20, 30))

    def test_the_slabs_pages_are_mapped_ahead_and_a_new_slabs_too(self, agent, make_engine):
        worker = make_engine().worker
        first, slab_bytes = worker._mapper, len(worker._slots._slab.everything)
        until(lambda: first.mapped_bytes == slab_bytes, "pages")
        incarnation = worker._slots.incarnation
        agent.kill()
        agent.start()
        until(lambda: worker._slots and worker._slots.incarnation != incarnation, "new slab")
        second = until(lambda: (m := worker._mapper) is not first and m, "another mapper")
        until(lambda: second.mapped_bytes == slab_bytes, "pages")
        worker.close()
        assert not first._thread.is_alive()
        assert not second._thread.is_alive()

    def test_starts_without_an_agent_and_finds_it_later(self, agent, make_engine):
        agent.kill()
        engine = Engine(agent, "p1", "kv_producer")
        object.__setattr__(engine.settings, "start_timeout_seconds", 0.05)
        try:
            engine.worker.register({f"layer.{i}": engine.cache[i] for i in range(LAYERS)})
            assert engine.worker._session.welcome is None
            agent.start()
            until(lambda: engine.worker._session.welcome, "the agent to be found")
        finally:
            engine.stop()

    def test_b29_a_refusal_ends_the_start_with_the_agents_words(self, agent, make_engine):
        with pytest.raises(RefusedError, match="pool block has 16 tokens, the agent's 8"):
            make_engine(block_tokens=16)

    def test_another_dtype_shares_nothing(self, agent, make_engine):
        prefill, decode = make_engine(), make_engine("d1", "kv_consumer", kv_dtype="other")
        prefill.run(TOKENS)
        until(lambda: agent.stats().stored_blocks_total == 5, "stores")
        assert decode.run(TOKENS)[0] == 0

    def test_counts(self, agent, make_engine):
        prefill = make_engine()
        prefill.run(TOKENS)
        counts = prefill.worker.take_counts()
        assert counts["stored_blocks"] == 5
        assert counts["stored_bytes"] == 5 * prefill.worker._paged.block_bytes
        assert prefill.worker.take_counts() == {}


class TestRequests:
    def test_what_a_client_may_put_into_the_params_is_harmless(self):
        for params in (None, 3, [], "x", {}, {"perilune": 3}, {"perilune": {"transfer_id": 1}}):
            request = fake_request(TOKENS)
            request.kv_transfer_params = params
            info = request_info(request, BLOCK)
            assert (info.transfer_id, info.leg, info.expected_blocks) == ("", "", 0)

    @pytest.mark.parametrize("count", [-1, True, "5", None, 2.5])
    def test_a_count_that_is_none(self, count):
        request = fake_request(TOKENS, params={"transfer_id": "t", "num_blocks": count})
        assert request_info(request, BLOCK).expected_blocks == 0

    @pytest.mark.parametrize(
        "changes",
        [
            {"prompt_token_ids": None},
            {"prompt_embeds": object()},
            {"skip_reading_prefix_cache": True},
            {"resumable": True},
            {"sampling_params": None},
        ],
    )
    def test_requests_that_stay_out_of_the_pool(self, changes):
        assert request_info(fake_request(TOKENS, **changes), BLOCK).skip

    def test_lora_is_name_and_source(self):
        one = fake_request(TOKENS, lora_request=SimpleNamespace(lora_name="a", lora_path="/x"))
        two = fake_request(TOKENS, lora_request=SimpleNamespace(lora_name="a", lora_path="/y"))
        assert request_info(one, BLOCK).lora != request_info(two, BLOCK).lora

    def test_b35_images_belong_to_the_blocks_that_they_touch_with_their_whole_digest(self):
        feature = SimpleNamespace(
            identifier="f" * 64, mm_position=SimpleNamespace(offset=6, length=12)
        )
        extras = media_extras([feature], 33, BLOCK)
        digest = b"f" * 64
        assert extras == [(digest + b"@6",), (digest + b"@-2",), (digest + b"@-10",), ()]

    def test_resumed_and_running_requests(self):
        output = fake_output("new", 0, 8, [1, 2])
        output.scheduled_cached_reqs = SimpleNamespace(
            req_ids=["a", "b", "c"],
            resumed_req_ids={"b"},
            new_block_ids=[([5],), ([6, 7],), None],
            num_computed_tokens=[10, 20, 30],
        )
        output.num_scheduled_tokens |= {"a": 1, "b": 2, "c": 1}
        found = {part.request_id: part for part in scheduled_of(output)}
        assert (list(found["a"].block_ids), found["a"].replaces_blocks) == ([5], False)
        assert (list(found["b"].block_ids), found["b"].replaces_blocks) == ([6, 7], True)
        assert (list(found["c"].block_ids), found["c"].num_scheduled_tokens) == ([], 1)
        assert found["new"].replaces_blocks


def test_info_is_made_without_vllm():
    assert isinstance(request_info(fake_request(TOKENS), BLOCK), RequestInfo)
    assert "vllm" not in sys.modules
