"""Prompts of records: kept apart, within a time and a size of their own."""

from __future__ import annotations

import base64
import zlib
from array import array
from datetime import timedelta

import pytest

from controlplane.policies.schemas import RecordsSpec
from controlplane.prompts import service

KEYS = bytes(range(48))
IDS = [1, 5, 70_000, 2]


def prompt(keys=KEYS, ids=IDS, **changes):
    packed = None if ids is None else zlib.compress(array("i", ids).tobytes())
    return {
        "namespace": "ab" * 32,
        "block_tokens": 16,
        "num_tokens": 50,
        "keys": base64.b64encode(keys).decode(),
        "tokens": None if packed is None else base64.b64encode(packed).decode(),
        **changes,
    }


async def test_keys_and_ids_come_back_and_not_in_the_record(both, bodies):
    record = bodies["decision"]("r1", prompt=prompt())
    assert (await both.report(decisions=[record])).status_code == 200
    found = await both.get("/decisions/r1/prompt")
    assert found["keys"] == [KEYS[:16].hex(), KEYS[16:32].hex(), KEYS[32:].hex()]
    assert found["token_ids"] == IDS
    assert (found["namespace"], found["block_tokens"], found["num_tokens"]) == ("ab" * 32, 16, 50)
    assert (await both.get("/decisions/r1"))["prompt"] is None


async def test_ids_are_null_where_only_keys_are_kept(both, bodies):
    await both.report(decisions=[bodies["decision"]("r1", prompt=prompt(ids=None))])
    assert (await both.get("/decisions/r1/prompt"))["token_ids"] is None


async def test_a_request_without_a_prompt_says_where_to_look(both, bodies):
    await both.report(decisions=[bodies["decision"]("r1")])
    reply = await both.http.get("/api/v1/decisions/r1/prompt")
    assert reply.status_code == 404
    assert "records policy" in reply.json()["way_out"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"keys": "!"}, "keys"),
        ({"keys": base64.b64encode(b"short").decode()}, "prompt.keys"),
        ({"keys": "AAA"}, "prompt.keys"),
        ({"namespace": "x"}, "namespace"),
        ({"block_tokens": 0}, "block_tokens"),
    ],
)
async def test_a_bad_prompt_is_named(both, bodies, changes, named):
    reply = await both.report(decisions=[bodies["decision"]("r1", prompt=prompt() | changes)])
    assert reply.status_code == 422
    assert named in reply.text


async def test_the_oldest_go_beyond_the_size_and_all_beyond_the_time(both, bodies):
    base = both.clock.now()
    records = [
        bodies["decision"](
            f"r{number}",
            at=(base + timedelta(seconds=number)).isoformat(),
            prompt=prompt(keys=bytes(400_000), ids=None),
        )
        for number in range(4)
    ]
    await both.report(decisions=records)
    async with both.plane.db.write() as tx:
        await service.prune(tx.session, base, RecordsSpec(prompt_mib=1))
    kept = [(await both.http.get(f"/api/v1/decisions/r{n}/prompt")).status_code for n in range(4)]
    assert kept == [404, 404, 200, 200]
    async with both.plane.db.write() as tx:
        late = base + timedelta(hours=1, seconds=3)
        await service.prune(tx.session, late, RecordsSpec(prompt_hours=1))
    kept = [(await both.http.get(f"/api/v1/decisions/r{n}/prompt")).status_code for n in range(4)]
    assert kept == [404, 404, 404, 200]


async def test_damaged_ids_leave_the_keys(both, bodies):
    broken = prompt(tokens=base64.b64encode(b"no zlib").decode())
    await both.report(decisions=[bodies["decision"]("r1", prompt=broken)])
    found = await both.get("/decisions/r1/prompt")
    assert found["token_ids"] is None
    assert len(found["keys"]) == 3


async def test_a_sampled_record_counts_for_those_it_stands_for(both, bodies):
    leg = {
        "type": "LegReport", "transfer_id": "t-r1", "worker_id": "d1", "kv_role": "kv_consumer",
        "prompt_tokens": 100, "loaded_blocks": 3, "kv_wait_seconds": 0.2,
    }  # fmt: skip
    await both.heartbeat("n1", leg_reports=[leg])
    record = bodies["decision"]("r1", ttft_seconds=0.5, e2e_seconds=1.3, sampled_one_in=10)
    await both.report(decisions=[record])
    both.second()
    pairs = (await both.get("/transfers/matrix"))["pairs"]
    assert [pair["transfers"] for pair in pairs] == [10]
