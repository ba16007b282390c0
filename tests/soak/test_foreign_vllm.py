"""The gateway in front of real vLLM engines with upstream's own connectors (`make soak`).

KV has to travel (hits of the decode engine's external cache), answers have to be those of an engine
that is asked directly, and however a request ends, no engine may go on holding blocks for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from upstream_engines import (
    MODEL,
    Connector,
    Process,
    link_library,
    site_of,
    start_engine,
    start_gateway,
    static_file,
)

from controlplane.bench.processes import free_port

pytestmark = [pytest.mark.soak, pytest.mark.vllm]

FREE_SECONDS = 90.0
"""Shorter than the timers by which the connectors free what nobody has taken."""
HITS = "vllm:external_prefix_cache_hits_total"
SENTENCE = "The capital of France is the city of Paris, and that of Italy is the city of Rome. "


@dataclass
class Rig:
    connector: Connector
    prefill: Process
    decode: Process
    gateway: Process

    def settle(self, what: str) -> None:
        """Until no engine holds a block."""
        deadline = time.monotonic() + FREE_SECONDS
        usage = "vllm:kv_cache_usage_perc"
        while held := {e.name: e.metrics()[usage] for e in (self.prefill, self.decode)}:
            if not any(held.values()):
                return
            assert time.monotonic() < deadline, f"{what}: still held {held}"
            time.sleep(0.3)


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def rig(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    connector: Connector = request.param
    if site_of(connector) is None:
        pytest.skip(f"{connector} is not installed: make peers")
    folder = tmp_path_factory.mktemp(connector)
    link_library(connector, folder)
    with ExitStack() as stack:
        side_port = free_port()
        engines = {}
        for role, side in (("prefill", side_port), ("decode", free_port())):
            engine = start_engine(connector, role, folder, model_folder, free_port(), side)  # type: ignore[arg-type]
            stack.callback(engine.end)
            engines[role] = engine
        for engine in engines.values():
            engine.wait_ready("/v1/models")
        static = static_file(connector, engines, side_port)  # type: ignore[arg-type]
        gateway = start_gateway(folder, free_port(), static)
        stack.callback(gateway.end)
        gateway.wait_ready("/v1/models")
        yield Rig(connector, engines["prefill"], engines["decode"], gateway)


def text_of(reply: httpx2.Response) -> str:
    assert reply.status_code == 200, reply.text
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["choices"][0]["text"])
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_kv_travels_and_the_text_is_the_engines_own(rig: Rig, stream: bool) -> None:
    prompt = f"{stream} {rig.connector}: {SENTENCE * 8}The capital of Spain is the city of"
    before = rig.decode.metrics()[HITS]
    reply = rig.gateway.complete(prompt=prompt, max_tokens=8, stream=stream)
    hits = rig.decode.metrics()[HITS] - before
    direct = rig.prefill.complete(prompt=prompt, max_tokens=8)
    assert text_of(reply) == text_of(direct)
    assert hits == direct.json()["usage"]["prompt_tokens"]
    rig.settle("after an answer")


def test_each_of_several_prompts_gets_its_own_answer(rig: Rig) -> None:
    prompts = [f"{SENTENCE}The capital of Spain is the city of", "One two three four five six"]
    reply = rig.gateway.complete(prompt=prompts, max_tokens=6)
    assert reply.status_code == 200, reply.text
    found = [choice["text"] for choice in reply.json()["choices"]]
    assert found == [text_of(rig.prefill.complete(prompt=p, max_tokens=6)) for p in prompts]
    rig.settle("after several prompts")


def test_a_first_token_that_ends_the_answer_keeps_nobody_waiting(rig: Rig) -> None:
    prompt = f"{SENTENCE}The capital of Spain is the city of"
    first = rig.prefill.complete(prompt=prompt, max_tokens=1, logprobs=1, return_token_ids=True)
    ends: list[int] = first.json()["choices"][0]["token_ids"]
    started = time.monotonic()
    reply = rig.gateway.complete(prompt=prompt, max_tokens=8, stop_token_ids=ends)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    assert time.monotonic() - started < FREE_SECONDS
    rig.settle("after an answer of one token")


@pytest.mark.parametrize("field", [{"logprobs": 100}, {"min_tokens": "abc"}])
def test_what_only_leg_2_refuses_is_freed(rig: Rig, field: dict[str, Any]) -> None:
    reply = rig.gateway.complete(prompt=SENTENCE, max_tokens=8, **field)
    assert reply.status_code == 400, reply.text
    rig.settle(f"after {field}")


def test_a_client_that_leaves_in_either_leg_leaves_nothing(rig: Rig) -> None:
    body = {"model": MODEL, "prompt": SENTENCE, "max_tokens": 200, "stream": True}
    url = f"{rig.gateway.url}/v1/completions"
    with httpx2.stream("POST", url, json=body, timeout=100) as reply:
        next(reply.iter_lines())
    rig.settle("left during leg 2")
    body["prompt"] = "word " * 900
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(url, json=body, timeout=0.7)
    rig.settle("left during leg 1")
