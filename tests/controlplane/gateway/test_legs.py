"""What each leg's worker sees, and what the client gets back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from workers.engines.emulated.faults import Faults

PROMPT = "the quick brown fox jumps over the lazy dog " * 20


async def test_a_request_runs_two_legs_joined_by_one_transfer(rig: Any) -> None:
    await rig.start()
    response = await rig.complete(prompt=PROMPT, max_tokens=7)
    assert response.status_code == 200
    assert response.headers["x-perilune-emulated"] == "true"
    (first,), (second,) = rig.prefill_bodies(), rig.decode_bodies()
    ours = first["kv_transfer_params"]["perilune"]
    theirs = second["kv_transfer_params"]["perilune"]
    assert ours["leg"] == "prefill"
    assert theirs == {"transfer_id": ours["transfer_id"], "leg": "decode", "num_blocks": 2}
    assert (first["max_tokens"], second["max_tokens"]) == (1, 7)
    assert response.json()["usage"]["completion_tokens"] == 7
    assert response.json()["kv_transfer_params"] is None


async def test_stream_and_plain_say_the_same(rig: Any) -> None:
    await rig.start()
    plain = (await rig.complete(prompt=PROMPT, max_tokens=9)).json()["choices"][0]["text"]
    events = await rig.stream(prompt=PROMPT, max_tokens=9)
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == plain


@pytest.mark.parametrize("caps", [
    {"max_completion_tokens": 200},
    {"max_tokens": 200},
    {"max_tokens": 300, "max_completion_tokens": 200},
])  # fmt: skip
async def test_a12_every_output_cap_is_one_on_the_prefill_leg(
    rig: Any, caps: dict[str, int]
) -> None:
    await rig.start()
    assert (await rig.chat(**caps)).status_code == 200
    (first,), (second,) = rig.prefill_bodies(), rig.decode_bodies()
    sent = {"max_tokens", "max_completion_tokens"}
    assert {name: first[name] for name in sent & first.keys()} == dict.fromkeys(caps, 1)
    assert {name: second[name] for name in sent & second.keys()} == caps


@pytest.mark.parametrize(("path", "cap"), [
    ("completions", "max_tokens"), ("chat", "max_completion_tokens"),
])  # fmt: skip
async def test_a12_a_cap_that_was_not_sent_is_not_invented_on_decode(
    rig: Any, path: str, cap: str
) -> None:
    await rig.start()
    response = await (rig.chat() if path == "chat" else rig.complete(prompt="hello there"))
    assert response.status_code == 200
    (first,), (second,) = rig.prefill_bodies(), rig.decode_bodies()
    assert first[cap] == 1
    assert not {"max_tokens", "max_completion_tokens"} & second.keys()


async def test_a13_min_tokens_and_stream_options_stay_off_the_prefill_leg(rig: Any) -> None:
    await rig.start()
    options = {"include_usage": True}
    events = await rig.stream(prompt=PROMPT, max_tokens=500, min_tokens=100, stream_options=options)
    assert json.loads(events[-2])["usage"]["completion_tokens"] >= 100
    (first,), (second,) = rig.prefill_bodies(), rig.decode_bodies()
    assert not {"min_tokens", "stream_options"} & first.keys()
    assert first["stream"] is False
    assert second["min_tokens"] == 100
    assert second["stream_options"] == options


@pytest.mark.parametrize("fields", [
    {"min_tokens": 100, "max_tokens": 500},
    {"min_tokens": 100},  # above the default of 16
    {"min_tokens": 10, "max_tokens": 5},
    {"max_tokens": 0},
    {"max_tokens": "many"},
    {"n": 0},
    {"stream_options": {"include_usage": True}},
    {"temperature": 0.0, "logprobs": 1},
    {"cache_salt": ""},
    {"stream": "yes"},
])  # fmt: skip
async def test_a14_same_status_through_the_gateway_and_directly(
    rig: Any, fields: dict[str, Any]
) -> None:
    await rig.start()
    ours = await rig.complete(prompt="hello there", **fields)
    body = {"model": "tiny", "prompt": "hello there", **fields}
    direct = await rig.client.post(f"{rig.fleet.urls['d1']}/v1/completions", json=body)
    assert ours.status_code == direct.status_code
    if direct.status_code != 200:
        assert ours.json() == direct.json()
    assert rig.gateway.stats.failed == 0
    assert rig.gateway.cluster.health.paused(0.0) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a15_cached_tokens_are_the_prefill_legs_own(rig: Any, stream: bool) -> None:
    """Decode counts what was handed over as cached; a cold prompt has none."""
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()

    async def usage() -> dict[str, Any]:
        if not stream:
            return (await rig.complete(prompt=PROMPT, max_tokens=2)).json()["usage"]
        options = {"include_usage": True}
        events = await rig.stream(prompt=PROMPT, max_tokens=2, stream_options=options)
        return json.loads(events[-2])["usage"]

    cold, warm = await usage(), await usage()
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < warm["prompt_tokens_details"]["cached_tokens"] < warm["prompt_tokens"]
    assert cold["prompt_tokens"] == warm["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a16_a_warm_prompt_is_cached_once_however_often_it_comes(
    rig: Any, stream: bool
) -> None:
    await rig.start()
    for _ in range(3):
        body = {"prompt": PROMPT * 3, "max_tokens": 2}
        if stream:
            events = await rig.stream(**body, stream_options={"include_usage": True})
            usage = json.loads(events[-2])["usage"]
        else:
            usage = (await rig.complete(**body)).json()["usage"]
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a25_many_choices_need_one_prefill(rig: Any) -> None:
    await rig.start()
    response = (await rig.complete(prompt=PROMPT, n=4, best_of=4, max_tokens=3)).json()
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    (first,), (second,) = rig.prefill_bodies(), rig.decode_bodies()
    assert first["n"] == 1
    assert "best_of" not in first
    assert second["n"] == 4
    alone = (await rig.complete(prompt=PROMPT, max_tokens=3)).json()
    assert response["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("prompt", "choices"), [
    ("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3, 4]], 2),
    (list(range(300)) * 20, 1), (["the quick brown fox " * 40, "a"], 2),
])  # fmt: skip
async def test_a26_every_legal_prompt_form_is_relayed(rig: Any, prompt: Any, choices: int) -> None:
    await rig.start()
    response = await rig.complete(prompt=prompt, max_tokens=2)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == choices
    assert [body["prompt"] for body in rig.seen()] == [prompt, prompt]
    assert rig.gateway.stats.tokenizer_mismatch == 0


@pytest.mark.parametrize("prompt", [[], None, 7, [[]], ["a", 1], {"a": 1}])
async def test_a26_an_illegal_form_gives_the_engines_own_error(rig: Any, prompt: Any) -> None:
    await rig.start()
    response = await rig.complete(prompt=prompt)
    direct = await rig.client.post(
        f"{rig.fleet.urls['p1']}/v1/completions", json={"model": "tiny", "prompt": prompt}
    )
    assert (response.status_code, response.json()) == (400, direct.json())


async def test_the_clients_bytes_reach_decode_unchanged(rig: Any) -> None:
    """Numbers, order and spacing of fields that we do not know stay as they were."""
    await rig.start()
    raw = b' { "model":"tiny" , "prompt":"hi there","x":1.10e2, "y":12345678901234567890123 }'
    response = await rig.client.post("/v1/completions", content=raw)
    assert response.status_code == 200
    (record,) = [r for name in ("d1", "d2") for r in rig.api(name).records]
    assert record["raw"].endswith(raw.decode().strip()[1:])


async def test_a_client_cannot_steer_transfers(rig: Any) -> None:
    await rig.start()
    theirs = {"perilune": {"transfer_id": "stolen", "leg": "decode", "num_blocks": 99}}
    response = await rig.complete(prompt="hello", kv_transfer_params=theirs)
    assert response.status_code == 200
    ids = {body["kv_transfer_params"]["perilune"]["transfer_id"] for body in rig.seen()}
    assert len(ids) == 1
    assert "stolen" not in ids


async def test_log_probabilities_of_the_prompt_are_computed_by_decode_alone(rig: Any) -> None:
    await rig.start()
    assert (await rig.complete(prompt="hello", echo=True, logprobs=1)).status_code == 200
    assert rig.prefill_bodies() == []
    assert rig.decode_bodies()[0]["kv_transfer_params"]["perilune"]["num_blocks"] == 0


async def test_two_requests_with_one_client_id_stay_apart(rig: Any) -> None:
    await rig.start()
    for _ in range(2):
        response = await rig.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "hi"},
            headers={"x-request-id": "mine", "host": "elsewhere:1", "expect": "100-continue"},
        )  # fmt: skip
        assert response.headers["x-request-id"] == "mine"
    records = [r for api in rig.fleet.apis.values() for r in api.records]
    ids = [record["headers"]["x-request-id"] for record in records]
    assert len(set(ids)) == len(ids) == 4
    assert not any("mine" in name for name in ids)
    assert all(record["headers"]["host"].startswith("127.0.0.1:") for record in records)


async def test_a_required_tool_call_does_not_break_the_one_token_leg(rig: Any) -> None:
    await rig.start()
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    response = await rig.chat(tools=[tool], tool_choice="required")
    assert response.status_code == 200
    assert rig.prefill_bodies()[0]["tool_choice"] == "none"
    assert rig.decode_bodies()[0]["tool_choice"] == "required"


LONG = "hello " * 20_000
SAID = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize(("path", "body", "cap"), [
    ("completions", {"prompt": LONG}, 16),
    ("completions", {"prompt": [LONG, "b"], "max_tokens": 7}, 7),
    ("completions", {"prompt": [LONG], "max_tokens": 7, "stream": True}, 7),
    ("completions", {"prompt": [504] * 20_000}, 16),
    ("completions", {"prompt": [[504], [504] * 20_000], "max_tokens": 9}, 9),
    ("chat/completions", {"messages": SAID, "max_completion_tokens": 50}, 50),
    ("chat/completions", {"messages": SAID * 3, "max_tokens": 50}, 50),
])  # fmt: skip
@pytest.mark.parametrize("hedge", [False, True])
async def test_a_prompt_too_long_to_be_counted_is_refused_in_the_clients_own_numbers(
    rig: Any, path: str, body: dict[str, Any], cap: int, hedge: bool
) -> None:
    """Leg 1 asks for one token, of which the client knows nothing."""
    rig.settings = replace(rig.settings, max_tokenise_chars=1000)
    spec = {"hedge_prefill_after_s": 0.01, "hedge_max_share": 1.0} if hedge else {}
    rig.policies = [rig.policy("scheduling", **spec)]
    await rig.start()
    response = await rig.client.post(f"/v1/{path}", json={"model": "tiny", **body})
    assert response.status_code == 400
    assert f"you requested {cap} output tokens" in response.json()["error"]["message"]
    assert len(rig.decode_bodies()) == 1
    assert len(rig.prefill_bodies()) <= 1 + hedge
    record = await rig.control_plane.ended("failed")
    assert f"{cap} output tokens" in record.error
    assert rig.gateway.stats.decode_side_prefills == 0
    assert rig.gateway.stats.client_errors == 1
    loads = rig.gateway.cluster.loads()
    assert not any(load.failures_total for load in loads.values())


async def test_what_leg_1_alone_refuses_of_such_a_prompt_decode_serves(rig: Any) -> None:
    rig.settings = replace(rig.settings, max_tokenise_chars=1000)
    await rig.start()
    for name in ("p1", "p2"):
        rig.api(name).faults.set(Faults(status=400))
    assert (await rig.complete(prompt=PROMPT * 10, max_tokens=3)).status_code == 200
    assert len(rig.prefill_bodies()) == 1


async def test_the_length_of_token_ids_is_known_without_a_tokenizer(rig: Any) -> None:
    rig.settings = replace(rig.settings, max_tokenise_chars=1000)
    await rig.start()
    assert (await rig.complete(prompt=[504] * 20_000)).status_code == 400
    assert (await rig.complete(prompt=[[504] * 20_000, [504]])).status_code == 400
    assert not rig.prefill_bodies()
    assert (await rig.complete(prompt=[504] * 2000, max_tokens=3)).status_code == 200
    assert len(rig.prefill_bodies()) == 1


@pytest.mark.parametrize(
    "prompt", [[], [[]], [504] * 2000 + ["a"], [[504], "b" * 2000], ["a", [504] * 2000]]
)
async def test_what_is_no_prompt_is_the_engines_to_judge(rig: Any, prompt: Any) -> None:
    rig.settings = replace(rig.settings, max_tokenise_chars=1000)
    await rig.start()
    response = await rig.complete(prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"
