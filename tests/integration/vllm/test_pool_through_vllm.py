"""Real engines: right hits, right text, whatever happens to the pool meanwhile."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import LookupReply, ReportCorrupt, StoredSlot
from workers.pool.arena import Slab

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.xdist_group("vllm")]

BLOCK = 32
HITS = "vllm:external_prefix_cache_hits_total"
COMPUTED = "vllm:prompt_tokens_by_source_total/local_compute"
LOADED = "perilune_connector_loaded_blocks_total"
FAILED = "perilune_connector_load_failed_blocks_total"
CORRUPT = "perilune_connector_load_corrupt_blocks_total"
STORED = "perilune_connector_stored_blocks_total"
PROMOTED = "perilune_connector_promoted_blocks_total"


def usable(num_tokens):
    """Tokens of a prompt that leg 2 can take: whole blocks, one token left to compute."""
    return (num_tokens - 1) // BLOCK * BLOCK


def namespace_of(cluster):
    return namespace_digest(cluster.stats().namespaces[0].spec)


def keys_of(cluster, tokens):
    return block_hashes(root_hash(namespace_of(cluster), None, None), tokens, BLOCK)


@pytest.fixture(autouse=True)
def nothing_is_left(cluster):
    yield
    cluster.wait_stats(
        lambda s: s.pinned_blocks == 0 and s.pending_blocks == 0 and s.num_owners == 0,
        "pins that stay",
    )


class TestHits:
    @pytest.mark.parametrize("num_tokens", [20, 5 * BLOCK, 5 * BLOCK + 1, 600])
    def test_decode_computes_at_most_a_block_and_a_token(self, cluster, num_tokens):
        tokens = cluster.tokens(num_tokens)
        answer = cluster.ask(tokens)
        held = usable(num_tokens)
        assert answer.num_blocks == num_tokens // BLOCK
        assert answer.decode_delta[HITS] == held
        assert answer.decode_delta[LOADED] == held // BLOCK
        assert answer.decode_delta[COMPUTED] == num_tokens - held <= BLOCK
        assert answer.text == cluster.reference(tokens, held)

    def test_shared_prefixes_are_loaded_once_they_are_known(self, cluster):
        shared = cluster.tokens(10 * BLOCK)
        first = shared + cluster.tokens(50)
        cluster.ask(first)
        cluster.prefill.empty_device_cache()
        second = shared + cluster.tokens(70)
        answer = cluster.ask(second)
        assert answer.prefill["pool_hit_tokens"] == 10 * BLOCK
        assert answer.prefill["device_hit_tokens"] == 0
        assert answer.text == cluster.reference(second, usable(len(second)))

    def test_pool_and_device_hits_add_up(self, cluster):
        tokens = cluster.tokens(12 * BLOCK + 5)
        cluster.ask(tokens)
        cluster.prefill.empty_device_cache()
        cluster.ask(tokens[: 5 * BLOCK + 3])
        answer = cluster.ask(tokens)
        assert answer.prefill["device_hit_tokens"] == 5 * BLOCK
        assert answer.prefill["pool_hit_tokens"] == 7 * BLOCK
        assert answer.text == cluster.reference(tokens, 12 * BLOCK)

    def test_what_the_pool_lost_and_the_device_holds_is_stored_again(self, cluster):
        tokens = cluster.tokens(8 * BLOCK + 5)
        cluster.ask(tokens)
        namespace, keys = namespace_of(cluster), keys_of(cluster, tokens)
        slots = cluster.client.prepare_load("load:test:1", namespace, keys[3:4])
        cluster.client.release("load:test:1")
        cluster.client.report_corrupt(
            ReportCorrupt(namespace, keys[3], slots[0].slot, slots[0].generation, "io")
        )
        assert cluster.client.lookup(namespace, keys).num_held == 3
        answer = cluster.ask(tokens)
        assert answer.prefill["device_hit_tokens"] == 8 * BLOCK
        assert answer.num_blocks == 8
        assert cluster.client.lookup(namespace, keys).num_held == 8

    def test_salts_do_not_share(self, cluster):
        tokens = cluster.tokens(6 * BLOCK + 4)
        cluster.ask(tokens, cache_salt="one")
        cluster.prefill.empty_device_cache()
        other = cluster.ask(tokens, cache_salt="two")
        assert other.prefill["pool_hit_tokens"] == 0
        cluster.prefill.empty_device_cache()
        same = cluster.ask(tokens, cache_salt="one")
        assert same.prefill["pool_hit_tokens"] == 6 * BLOCK

    def test_equal_concurrent_requests_are_all_right(self, cluster):
        tokens = cluster.tokens(9 * BLOCK + 7)
        transfer = cluster.transfer_id()
        said = cluster.leg_one(tokens, transfer)
        cluster.decode.empty_device_cache()

        def ask(_):
            reply = cluster.leg_two(tokens, transfer, said["num_blocks"], 8)
            return reply["choices"][0]["text"]

        with ThreadPoolExecutor(4) as threads:
            texts = set(threads.map(ask, range(4)))
        cluster.release(transfer)
        assert texts == {cluster.reference(tokens, usable(len(tokens)))}

    def test_a25_several_choices_come_from_one_prefill(self, cluster):
        tokens = cluster.tokens(4 * BLOCK + 7)
        transfer = cluster.transfer_id()
        said = cluster.leg_one(tokens, transfer)
        cluster.decode.empty_device_cache()
        before = cluster.decode.metrics()
        reply = cluster.leg_two(
            tokens, transfer, said["num_blocks"], 4, n=3, temperature=0.7, seed=1
        )
        after = cluster.decode.metrics()
        cluster.release(transfer)
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert reply["usage"]["prompt_tokens"] == len(tokens)
        assert after[LOADED] - before[LOADED] == 4  # the others take it from the device

    def test_b37_prompt_logprobs_read_nothing_and_count_nowhere(self, cluster):
        tokens = cluster.tokens(4 * BLOCK + 7)
        cluster.ask(tokens)
        before = cluster.stats()
        reply = cluster.prefill.post(
            "/v1/completions", cluster.body(tokens, 1) | {"prompt_logprobs": 0}
        )
        assert len(reply["choices"][0]["prompt_logprobs"]) == len(tokens)
        after = cluster.stats()
        assert after.prompt_tokens_total == before.prompt_tokens_total

    def test_preempted_requests_go_on_with_the_same_text(self, cluster):
        """Two of these fit into the decode engine's 65 blocks until both need a 33rd."""
        prompts = [cluster.tokens(31 * BLOCK + 20) for _ in range(2)]
        transfers = [cluster.transfer_id() for _ in prompts]
        said = [cluster.leg_one(*pair) for pair in zip(prompts, transfers, strict=True)]
        before = cluster.decode.metrics()

        def ask(index):
            reply = cluster.leg_two(prompts[index], transfers[index], said[index]["num_blocks"], 24)
            return reply["choices"][0]["text"]

        with ThreadPoolExecutor(2) as threads:
            texts = list(threads.map(ask, range(2)))
        after = cluster.decode.metrics()
        for transfer in transfers:
            cluster.release(transfer)
        assert after["vllm:num_preemptions_total"] > before["vllm:num_preemptions_total"]
        alone = [cluster.ask(prompt, 24).text for prompt in prompts]
        assert texts == alone


class TestTiers:
    def test_b24_what_went_to_ssd_comes_back_and_the_text_is_the_same(self, cluster):
        tokens = cluster.tokens(8 * BLOCK + 6)
        expected = cluster.ask(tokens).text
        demote(cluster, tokens)
        cluster.prefill.empty_device_cache()
        cluster.decode.empty_device_cache()
        before = cluster.prefill.metrics()
        reads = ssd_of(cluster).read_blocks_total
        answer = cluster.ask(tokens)
        assert answer.prefill["pool_hit_tokens"] == 8 * BLOCK
        assert answer.decode_delta[HITS] == 8 * BLOCK
        assert answer.text == expected
        assert ssd_of(cluster).read_blocks_total - reads >= 8
        assert cluster.prefill.metrics()[PROMOTED] - before[PROMOTED] == 8


class TestFaults:
    def test_i1_a_corrupted_slot_never_changes_the_text(self, cluster):
        tokens = cluster.tokens(7 * BLOCK + 9)
        transfer = cluster.transfer_id()
        said = cluster.leg_one(tokens, transfer)
        namespace, keys = namespace_of(cluster), keys_of(cluster, tokens)
        deadline = time.monotonic() + 30
        while cluster.client.lookup(namespace, keys).num_held < 7:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        slots = cluster.client.prepare_load("load:test:2", namespace, keys[4:5])
        cluster.client.release("load:test:2")
        flip_a_byte(cluster, slots[0].slot)
        before = cluster.decode.metrics()
        reply = cluster.leg_two(tokens, transfer, said["num_blocks"], 8)
        after = cluster.decode.metrics()
        cluster.release(transfer)
        assert after[CORRUPT] - before[CORRUPT] == 1
        assert after[FAILED] - before[FAILED] == 1
        # Blocks 0 to 3 were good; the rest was computed in one go.
        assert reply["choices"][0]["text"] == cluster.reference(tokens, 4 * BLOCK)
        cluster.wait_stats(lambda s: s.corrupt_total >= 1, "the report of the bad block")
        assert cluster.client.lookup(namespace, keys).num_held == 4

    def test_abort_in_a_chunked_prefill_leaves_nothing(self, cluster):
        tokens = cluster.tokens(1900)
        content = cluster.body(tokens, 200, transfer_id=cluster.transfer_id(), leg="prefill")
        connection = http.client.HTTPConnection("127.0.0.1", cluster.prefill.port, timeout=60)
        connection.request(
            "POST", "/v1/completions", json.dumps(content | {"stream": True}),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        cluster.wait_stats(lambda s: s.pinned_blocks > 0, "the first chunk's blocks")
        connection.close()
        cluster.release(content["kv_transfer_params"]["perilune"]["transfer_id"])

        def idle():
            running = cluster.prefill.metrics()["vllm:num_requests_running"]
            return running == 0

        deadline = time.monotonic() + 60
        while not idle():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        cluster.release(content["kv_transfer_params"]["perilune"]["transfer_id"])
        answer = cluster.ask(tokens[:500])
        assert answer.text == cluster.reference(tokens[:500], usable(500))

    def test_aborts_at_any_point_of_a_load_leave_nothing(self, cluster):
        tokens = cluster.tokens(20 * BLOCK + 3)
        transfer = cluster.transfer_id()
        said = cluster.leg_one(tokens, transfer)
        for pause in (0.0, 0.005, 0.02, 0.05, 0.1):
            cluster.decode.empty_device_cache()
            content = cluster.body(
                tokens, 50, transfer_id=transfer, leg="decode", num_blocks=said["num_blocks"]
            )
            connection = http.client.HTTPConnection("127.0.0.1", cluster.decode.port, timeout=60)
            connection.request(
                "POST", "/v1/completions", json.dumps(content | {"stream": True}),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            time.sleep(pause)
            connection.close()
        cluster.decode.empty_device_cache()
        reply = cluster.leg_two(tokens, transfer, said["num_blocks"], 8)
        cluster.release(transfer)
        assert reply["choices"][0]["text"] == cluster.reference(tokens, 20 * BLOCK)

    def test_leg_two_waits_for_blocks_that_are_still_written(self, cluster):
        """And takes what is there when they do not come within its bound."""
        tokens = cluster.tokens(6 * BLOCK + 2)
        namespace, keys = namespace_of(cluster), keys_of(cluster, tokens)
        pending = cluster.client.prepare_store("store:test:3", namespace, b"", keys)
        assert all(pending.slots)
        began = time.monotonic()
        reply = cluster.leg_two(tokens, cluster.transfer_id(), 6, 8)
        assert time.monotonic() - began >= 2.0
        cluster.client.complete_store("store:test:3", [], [s for s in pending.slots if s])
        cluster.client.release("store:test:3")
        assert reply["choices"][0]["text"] == cluster.reference(tokens, 0)

    def test_a_killed_agent_costs_hits_but_no_answer(self, cluster):
        tokens = cluster.tokens(8 * BLOCK + 6)
        expected = cluster.reference(tokens, 8 * BLOCK)
        assert cluster.ask(tokens).text == expected
        cluster.kill_agent()
        cluster.prefill.empty_device_cache()
        cluster.decode.empty_device_cache()
        without = cluster.ask(tokens)
        assert without.num_blocks == 0
        assert without.text == cluster.reference(tokens, 0)
        cluster.start_agent()
        cluster.wait_workers()
        deadline = time.monotonic() + 30
        while cluster.ask(tokens).num_blocks < 8:  # the device still has it, the new pool gets it
            assert time.monotonic() < deadline, "the prefill engine does not find the new agent"
        cluster.decode.empty_device_cache()
        hit = cluster.ask(tokens)
        assert hit.decode_delta[HITS] == 8 * BLOCK
        assert hit.text == expected

    def test_an_agent_killed_under_load_costs_no_answer(self, cluster):
        prompts = [cluster.tokens(10 * BLOCK + 3) for _ in range(4)]
        killer = threading.Timer(1.0, cluster.kill_agent)
        killer.start()
        texts = [cluster.ask(prompt, 4).text for prompt in prompts]
        killer.join()
        cluster.start_agent()
        cluster.wait_workers()
        for prompt, text in zip(prompts, texts, strict=True):
            cluster.decode.empty_device_cache()
            cluster.prefill.empty_device_cache()
            assert text in {
                cluster.reference(prompt, 10 * BLOCK, 4),
                cluster.reference(prompt, 0, 4),
            }

    def test_a_killed_api_server_takes_its_children_with_it(self, cluster):
        """Last: the prefill engine does not come back."""
        pids = cluster.prefill.pids()
        assert len(pids) >= 3
        os.kill(cluster.prefill.process.pid, signal.SIGKILL)
        cluster.prefill.process.wait(30)
        deadline = time.monotonic() + 30
        while alive := [pid for pid in pids if is_alive(pid)]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.1)
        cluster.wait_stats(
            lambda s: "p1" not in {w for n in s.namespaces for w in n.workers}, "p1's connection"
        )


def ssd_of(cluster):
    return next(tier for tier in cluster.stats().tiers if tier.tier == "ssd")


def demote(cluster, tokens):
    """Another worker's blocks push this prompt's out of memory, no faster than the disk writes."""
    namespace, keys = namespace_of(cluster), keys_of(cluster, tokens)
    client = cluster.worker_client()
    welcome = client.connect()
    size = cluster.stats().block_bytes
    deadline = time.monotonic() + 120
    try:
        with Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes) as slab:
            while (found := client.lookup(namespace, keys)) != LookupReply(0, 0, len(keys)):
                assert time.monotonic() < deadline, found
                client.hint(namespace, keys, "over")  # the first to go
                fillers = [os.urandom(16) for _ in range(8)]
                given = client.prepare_store("store:by-hand", namespace, b"", fillers)
                stored = [
                    StoredSlot(
                        ref.slot,
                        ref.generation,
                        slab.write_block(ref.slot, ref.generation, key, bytes(size)),
                    )
                    for key, ref in zip(fillers, given.slots, strict=True)
                    if ref is not None
                ]
                client.complete_store("store:by-hand", stored)
                client.release("store:by-hand")
                written = -1
                while written != (now := ssd_of(cluster).written_blocks_total):
                    written = now
                    time.sleep(0.02)
    finally:
        client.close()


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def flip_a_byte(cluster, slot):
    welcome = cluster.client.connect()
    with Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes) as slab:
        payload = slab.payload(slot)
        payload[1000] ^= 0xFF
        payload.release()
