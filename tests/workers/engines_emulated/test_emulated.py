"""The emulated engine answers as vLLM does, says that it is emulated, and fails on demand."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from workers.engines.emulated.fleet import Fleet
from workers.engines.emulated.worker import EngineConfig, WorkerSpec


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    specs = [WorkerSpec("p1", "prefill", 0), WorkerSpec("d1", "decode", 0)]
    config = EngineConfig("m", prefill_ms_per_token=0.01, decode_ms=0, max_model_len=512,
                          prompt_tokens_details=True)  # fmt: skip
    made = Fleet(specs, config)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(verify=False, timeout=20) as made:
        yield made


class Engine:
    def __init__(self, fleet: Fleet, client: httpx2.AsyncClient) -> None:
        self.url = fleet.urls["p1"]
        self.client = client
        self.api = fleet.apis["p1"]

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.client.post(self.url + path, json=body)

    async def complete(self, **body: Any) -> httpx2.Response:
        return await self.post("/v1/completions", **({"prompt": "hello there"} | body))

    async def chat(self, **body: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": "hi"}]
        return await self.post("/v1/chat/completions", **({"messages": messages} | body))


@pytest.fixture
def engine(fleet: Fleet, client: httpx2.AsyncClient) -> Engine:
    return Engine(fleet, client)


async def test_it_says_that_it_is_emulated(engine: Engine) -> None:
    response = await engine.client.get(engine.url + "/v1/models")
    assert response.headers["x-perilune-emulated"] == "true"
    assert response.json()["data"][0]["metadata"]["emulated"] is True
    assert (await engine.client.get(engine.url + "/health")).status_code == 200


async def test_text_is_deterministic_and_stream_equals_plain(engine: Engine) -> None:
    one = (await engine.complete(max_tokens=6)).json()
    assert (await engine.complete(max_tokens=6)).json()["choices"] == one["choices"]
    other = (await engine.complete(max_tokens=6, prompt="else")).json()
    assert other["choices"] != one["choices"]
    text = (await engine.complete(max_tokens=6, stream=True)).text
    events = [line[6:] for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    joined = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert joined == one["choices"][0]["text"]
    assert one["usage"]["completion_tokens"] == len(events) == 6


async def test_usage_counts_the_device_cache_until_it_is_reset(engine: Engine) -> None:
    async def cached() -> int:
        usage = (await engine.complete(prompt=list(range(200)), max_tokens=1)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert (await cached(), await cached()) == (0, 192)
    await engine.post("/reset_prefix_cache")
    assert await cached() == 0


@pytest.mark.parametrize(("fields", "status"), [
    ({"model": "other"}, 404), ({"max_tokens": 0}, 400), ({"max_tokens": "x"}, 400),
    ({"min_tokens": 5, "max_tokens": 2}, 400), ({"n": 0}, 400), ({"prompt": []}, 400),
    ({"prompt": [[1], "a"]}, 400), ({"stream_options": {}}, 400), ({"max_tokens": 600}, 400),
    ({"kv_transfer_params": 7}, 400), ({"cache_salt": ""}, 400), ({"stream": 1}, 400),
    ({"prompt": [1, 2, 3], "n": 2}, 200), ({"prompt": ["a", "b"]}, 200),
])  # fmt: skip
async def test_requests_are_judged_as_vllm_judges(
    engine: Engine, fields: dict[str, Any], status: int
) -> None:
    response = await engine.complete(**fields)
    assert response.status_code == status
    if status != 200:
        assert response.json()["error"]["code"] == status


@pytest.mark.parametrize(("field", "value"), [
    ("n", 1_000_000), ("prompt", [2**40]), ("prompt", [-1]), ("add_special_tokens", "x"),
])  # fmt: skip
async def test_odd_values_are_refused_at_once(engine: Engine, field: str, value: Any) -> None:
    response = await engine.complete(**{field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_a_fault_of_its_own_is_a_500_and_no_silence(engine: Engine) -> None:
    response = await engine.complete(kv_transfer_params={"perilune": {}})
    assert response.status_code == 500
    assert (await engine.complete()).status_code == 200


async def test_malformed_json_is_400(engine: Engine) -> None:
    response = await engine.client.post(engine.url + "/v1/completions", content=b"{")
    assert response.status_code == 400


async def test_chat_logprobs_and_errors(engine: Engine) -> None:
    response = await engine.chat(logprobs=True, top_logprobs=2, max_completion_tokens=3)
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert len(content[0]["top_logprobs"]) == 2
    assert (await engine.chat(top_logprobs=2)).status_code == 400
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert (await engine.chat(messages=image)).status_code == 400


async def test_transfer_parameters_come_back_in_plain_replies_only(engine: Engine) -> None:
    params = {"perilune": {"transfer_id": "t", "leg": "prefill"}}
    reply = (await engine.complete(prompt=list(range(150)), kv_transfer_params=params)).json()
    assert reply["kv_transfer_params"]["perilune"] == {"transfer_id": "t", "num_blocks": 2}
    text = (await engine.complete(kv_transfer_params=params, stream=True)).text
    assert "kv_transfer_params" not in text


async def test_faults_are_switched_on_and_off(engine: Engine) -> None:
    await engine.post("/debug/faults", status=503, times=2)
    assert [(await engine.complete()).status_code for _ in range(3)] == [503, 503, 200]
    await engine.post("/debug/faults", reset_after_chunks=2)
    with pytest.raises(httpx2.RemoteProtocolError):
        await engine.complete(stream=True)
    assert (await engine.post("/debug/faults", nonsense=1)).status_code == 400
    await engine.post("/debug/faults")
    assert (await engine.complete()).status_code == 200
    records = (await engine.client.get(engine.url + "/debug/requests")).json()
    assert [record["finished"] for record in records][-1] is True


async def test_metrics_have_vllms_names(engine: Engine) -> None:
    await engine.complete(max_tokens=4)
    text = (await engine.client.get(engine.url + "/metrics")).text
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 4\n' in text
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0\n' in text


def test_the_process_starts_says_its_ports_and_ends() -> None:
    command = [sys.executable, "-m", "workers.engines.emulated", "--model", "m",
               "--worker", "p1:prefill:0", "--worker", "d1:decode:0"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        assert ready["emulated"] is True
        assert set(ready["workers"]) == {"p1", "d1"}
        assert httpx2.get(ready["workers"]["d1"] + "/health").status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        process.stdout.close()


def test_a_wrong_worker_is_named() -> None:
    command = [sys.executable, "-m", "workers.engines.emulated", "--model", "m", "--worker", "p1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'p1' is no ID:prefill|decode|both:PORT" in done.stderr
