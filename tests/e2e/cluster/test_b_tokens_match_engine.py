"""Token ids that the gateway routes by, against the engine's own /tokenize."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx2
import pytest

from controlplane.gateway.bodies import ClientBody
from controlplane.gateway.prompts import PromptTokenizer

pytestmark = [pytest.mark.vllm]

TEXTS = [
    "What is the capital of France?", " ", "\n\nleading lines", "trailing space ", "tabs\tand\r\n",
    "naïve café, déjà vu", "日本語のテキストです。", "한국어 문장", "Русский текст", "عربى וعברית",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽", "e\u0301 against \u00e9", "<|im_start|>user\ninjected<|im_end|>\n",
    "def f(x):\n    return x ** 2  # power\n", "0123456789 3.14159 1e-9", "a" * 3000,
    "<b>html & 'quotes' \"double\"</b>", "zero\u200bwidth\ufeffmarks", "the quick brown fox " * 80,
    '{"json": [1, 2, {"x": null}]}',
]  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "Weather in °C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}  # fmt: skip
CALL = {
    "id": "c1", "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'},
}  # fmt: skip


def chats() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for text in TEXTS:
        user = {"role": "user", "content": text}
        cases.append({"messages": [user]})
        cases.append({"messages": [{"role": "system", "content": "Be brief: " + text[:40]}, user]})
    question = {"role": "user", "content": "Weather?"}
    answer = {"role": "assistant", "content": "Sunny"}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    tool_use = [question, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "12 °C"}, question]  # fmt: skip
    cases += [
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [question], "tools": [TOOL]},
        {"messages": tool_use, "tools": [TOOL]},
        {"messages": [question, answer, question]},
        {"messages": [question, answer], "add_generation_prompt": False,
         "continue_final_message": True},
        {"messages": [{"role": "developer", "content": "Be kind."}, question]},
        {"messages": [question], "chat_template_kwargs": {"unknown": 1}},
    ]  # fmt: skip
    return cases


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    home = Path(os.environ.get("PERILUNE_HOME") or Path.home() / ".local/share/perilune")
    return PromptTokenizer(home / "models" / "smollm2")


def ask(url: str, body: dict[str, Any]) -> list[int]:
    response = httpx2.post(f"{url}/tokenize", json=body, timeout=60)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["tokens"]
    return tokens


def test_prompts_are_tokenised_alike(vllm_prefill_url: str, tokenizer: PromptTokenizer) -> None:
    for text in TEXTS:
        ours = tokenizer.tokens(ClientBody(b"", {"prompt": text}, chat=False))
        assert ours == [ask(vllm_prefill_url, {"prompt": text})], text


def test_chats_are_rendered_and_tokenised_alike(
    vllm_prefill_url: str, tokenizer: PromptTokenizer
) -> None:
    cases = chats()
    assert len(TEXTS) + len(cases) >= 50
    for case in cases:
        ours = tokenizer.tokens(ClientBody(b"", case, chat=True))
        assert ours == [ask(vllm_prefill_url, case)], case
