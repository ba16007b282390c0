"""The public `openai` client against a plain engine and through the gateway: alike, field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from differential import ask, check_usage, differences
from live_cluster import LiveCluster
from openai_table import LONG, TABLE, Row

from workers.bench.cluster import PlainEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Pairs = dict[str, tuple[Row, dict[str, Any], dict[str, Any]]]


def _ask_all(url: str, model: str) -> list[dict[str, Any]]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return [ask(client, row, model) for row in TABLE]


@pytest.fixture(scope="module")
def answers(live: LiveCluster, plain: PlainEngine) -> Pairs:
    """Each side answers row after row, both sides at once."""
    with ThreadPoolExecutor(2) as pool:
        sides = [pool.submit(_ask_all, url, live.model) for url in (plain.url, live.gateway)]
        left, right = (side.result(timeout=800) for side in sides)
    return {
        f"{row.api} {row.name}": (row, a, b) for row, a, b in zip(TABLE, left, right, strict=True)
    }


def test_all_rows_are_alike_or_excused(answers: Pairs) -> None:
    assert len(answers) == len(TABLE) >= 80, "names must be unique"
    failed = {
        name: found
        for name, (row, plain, ours) in answers.items()
        if (found := list(differences(row, plain, ours)))
    }
    assert not failed, json.dumps(failed, indent=1, ensure_ascii=False)


def test_excuses_are_needed(answers: Pairs) -> None:
    """A row that is alike after all must not stay in the list of those that differ."""
    for row, plain, ours in answers.values():
        if row.different:
            bare = Row(row.name, row.api, row.arguments)
            assert list(differences(bare, plain, ours)), row.name


def test_a16_usage_is_possible_in_every_row(answers: Pairs) -> None:
    for _, _, ours in answers.values():
        check_usage(ours)


def test_a15_replies_and_streams_say_the_same_of_what_was_cached(live: LiveCluster) -> None:
    prompt = LONG + "Once more."
    with openai.OpenAI(base_url=f"{live.gateway}/v1", api_key="none", max_retries=0) as client:
        said = []
        for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}) * 2:
            arguments = {"prompt": prompt, "max_tokens": 3, "temperature": 0, **more}
            answer = ask(client, Row("", "completions", arguments), live.model)
            usage = (answer.get("body") or answer["stream"])["usage"]
            said.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert said[1] == said[2] == said[3] > 0, said
    assert said[0] <= said[1]


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a18_every_token_has_its_log_probability(answers: Pairs, api: str) -> None:
    rows = [answers[f"{api} logprobs"], answers[f"{api} stream with logprobs"]]
    for _, _, ours in rows:
        choice = (ours.get("body") or ours["stream"])["choices"][0]
        entries = choice["logprobs"]["tokens" if api == "completions" else "content"]
        assert len(entries) == 6, entries


def test_a19_prompt_log_probabilities_and_echo_leave_decode_alive(answers: Pairs) -> None:
    _, plain, ours = answers["completions prompt_logprobs"]
    assert ours["status"] == 200
    both = [side["body"]["choices"][0]["prompt_logprobs"] for side in (plain, ours)]
    assert len(both[0]) == len(both[1]) > 2
    assert answers["completions echo with logprobs"][2]["status"] == 200


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=120) as made:
        yield made


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    ("/detokenize", {"tokens": [504, 28, 827]}),
    ("/v1/embeddings", {"input": "a text"}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/responses", {"input": LONG + "Go on.", "max_output_tokens": 6, "temperature": 0}),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 6,
                      "temperature": 0}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
])  # fmt: skip
def test_other_routes_answer_as_the_engine_does(
    live: LiveCluster, plain: PlainEngine, client: httpx2.Client, path: str, body: dict[str, Any]
) -> None:
    both = [
        client.post(f"{url}{path}", json={"model": live.model, **body})
        for url in (plain.url, live.gateway)
    ]
    row = Row(path, "chat", {}, dict.fromkeys(OF_ONE_RUN, "of one run"))
    assert both[0].status_code == both[1].status_code
    assert not list(differences(row, *(_json(reply) for reply in both)))


OF_ONE_RUN = ("created_at", "completed_at", "usage", "detail")


def _json(reply: httpx2.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        return reply.text
