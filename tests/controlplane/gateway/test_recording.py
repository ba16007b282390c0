"""The records policy: sampling, what is kept of prompts, and the bounds of what waits."""

from __future__ import annotations

import base64
import zlib
from array import array
from datetime import UTC, datetime
from math import inf
from typing import Any

import pytest
from reported import reported

from controlplane.gateway import recording
from controlplane.gateway import records as records_module
from controlplane.gateway.recording import Recording, Sampler, recording_of
from controlplane.gateway.records import JOIN_SECONDS, Records
from controlplane.gateway.stats import Stats
from controlplane.gateway.wire import Decision
from controlplane.policies.schemas import RecordsSpec

KEYS = [bytes([number]) * 16 for number in range(3)]
TOKENS = list(range(50))


def decision(name: str, status: str = "running") -> Decision:
    return Decision(name, datetime.now(UTC), "g", status)  # type: ignore[arg-type]


def test_the_policys_own_defaults_are_ours() -> None:
    assert recording_of(RecordsSpec().model_dump()) == recording_of({}) == Recording()


def run(records: Records, number: int, rule: Recording, status: str) -> None:
    record = decision(f"r{number}")
    entry = records.begin(record, rule)
    record.status = status  # type: ignore[assignment]
    records.end(entry, 1.0)


def test_one_in_so_many_of_those_that_end_well_and_all_others() -> None:
    records, rule = Records(Stats()), Recording(one_in=10)
    for number in range(100):
        run(records, number, rule, "failed" if number % 25 == 3 else "finished_stop")
    sent = reported(records)
    well = [d for d in sent if d.status == "finished_stop"]
    assert len(well) == 10
    assert {d.sampled_one_in for d in well} == {10}
    badly = [d for d in sent if d.status == "failed"]
    assert len(badly) == 4
    assert {d.sampled_one_in for d in badly} == {1}
    assert records.sampler.sampled_out == 86
    assert records.num_joining == 0


def test_a_running_one_that_will_not_be_kept_is_not_announced() -> None:
    records, rule = Records(Stats()), Recording(one_in=2)
    for number in range(4):
        records.begin(decision(f"r{number}"), rule)
    assert [d.request_id for d in reported(records)] == ["r0", "r2"]


def test_one_that_has_ended_and_waits_for_its_legs_reports_is_told_once() -> None:
    records = Records(Stats())
    running, ended = (records.begin(decision(name)) for name in ("running", "ended"))
    for entry in (running, ended):
        entry.expects_prefill = entry.has_agent = True
    ended.decision.status = "finished_stop"
    records.end(ended, 1.0)
    assert [d.request_id for d in reported(records)] == ["running"]
    records.sweep(1.0 + JOIN_SECONDS)
    assert [d.request_id for d in reported(records)] == ["ended"]


def test_more_than_may_wait_for_late_reports_are_told_once_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records_module, "MAX_JOINING", 10)
    records, told = Records(Stats()), []
    for number in range(50):
        entry = records.begin(decision(f"r{number}"))
        entry.expects_prefill = entry.has_agent = True
        entry.decision.status = "finished_stop"
        records.end(entry, float(number))
        records.sweep(float(number))
        told += reported(records)
    records.sweep(inf)
    told += reported(records)
    assert sorted(d.request_id for d in told) == sorted(f"r{number}" for number in range(50))
    assert records.num_joining <= 10


def test_one_of_too_many_that_run_is_told_and_counted_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records_module, "MAX_JOINING", 2)
    stats = Stats()
    records = Records(stats)
    entries = [records.begin(decision(f"r{number}")) for number in range(5)]
    assert [d.status for d in reported(records)] == ["running"] * 5
    for entry in entries:
        entry.decision.status, entry.decision.prompt_tokens = "finished_stop", 7
        records.end(entry, 1.0)
    assert [d.status for d in reported(records)] == ["finished_stop"] * 5
    assert stats.prompt_tokens == 35


@pytest.mark.parametrize(("kept", "tokens"), [("none", None), ("keys", None), ("tokens", TOKENS)])
def test_what_the_policy_says_is_kept_of_a_prompt(kept: Any, tokens: Any) -> None:
    sampler, record = Sampler(), decision("r")
    sampler.add_prompt(record, Recording(prompts=kept), b"n" * 32, 16, KEYS, TOKENS)
    if kept == "none":
        assert record.prompt is None
        return
    assert record.prompt is not None
    assert base64.b64decode(record.prompt.keys) == b"".join(KEYS)
    assert (record.prompt.namespace, record.prompt.num_tokens) == ((b"n" * 32).hex(), 50)
    packed = record.prompt.tokens
    ids = None if packed is None else array("i", zlib.decompress(base64.b64decode(packed))).tolist()
    assert ids == tokens


def test_prompts_that_wait_are_bounded_and_room_comes_back(monkeypatch: Any) -> None:
    monkeypatch.setattr(recording, "MAX_BUFFERED_BYTES", 150)
    sampler, rule = Sampler(), Recording()
    rows = [decision(f"r{number}", "finished_stop") for number in range(4)]
    for row in rows:
        sampler.add_prompt(row, rule, b"n" * 32, 16, KEYS, TOKENS)
    assert [row.prompt is not None for row in rows] == [True, True, False, False]
    assert sampler.prompts_left_out == 2
    for row in (*rows, *rows):
        sampler.forget_prompt(row)  # again does no harm
    sampler.add_prompt(rows[3], rule, b"n" * 32, 16, KEYS, TOKENS)
    assert rows[3].prompt is not None


def test_a_late_report_sends_the_record_again_without_its_prompt() -> None:
    records, rule = Records(Stats()), Recording()
    record = decision("r")
    entry = records.begin(record, rule)
    record.status = "finished_stop"
    records.sampler.add_prompt(record, rule, b"n" * 32, 16, KEYS, TOKENS)
    entry.has_agent = True
    records.end(entry, 1.0)
    first = reported(records)
    records.put_back(first)  # did not arrive
    assert reported(records)[0].prompt is not None
    records.arrived(first)
    assert record.prompt is None


async def test_sampling_acts_on_the_next_request(rig: Any, eventually: Any) -> None:
    rig.policies = [rig.policy("records", sample_one_in=5)]
    await rig.start()
    for _ in range(10):
        assert (await rig.complete(prompt="hello", max_tokens=2)).status_code == 200
    await eventually(lambda: len(rig.control_plane.decisions()) == 2)
    assert rig.gateway.records.sampler.sampled_out == 8
    await rig.publish(policies=[rig.policy("records", 2, sample_one_in=1)])
    await rig.complete(prompt="hello", max_tokens=2)
    await eventually(lambda: len(rig.control_plane.decisions()) == 3)
