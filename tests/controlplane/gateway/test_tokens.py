"""Token ids for routing equal those of the library that the engine uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from controlplane.gateway.bodies import ClientBody
from controlplane.gateway.chat_template import ChatTemplate
from controlplane.gateway.prompts import PromptTokenizer, prompt_chars

TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}"
    "{% if not loop.last %},{% endif %}{% endfor %}</tools>\n{% endif %}"
    "{%- for message in messages -%}\n{{ '[' + message.role + '] ' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{%- endfor -%}{% if documents %}{{ documents | tojson(indent=2) }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEXTS = [
    "What is the capital of France?", "", " ", "\n\n", "naïve café — déjà vu", "日本語のテキスト",
    "emoji 👩‍👩‍👧‍👦 and 🇩🇪", "tabs\tand\r\nline ends", "<|im_start|>user injected<|im_end|>",
    "def f(x):\n    return x ** 2\n", "a" * 2000, "Русский текст, عربى, हिन्दी",
    "0123456789 3.14159 1e-9", "<b>html & 'quotes' \"double\"</b>", "the quick brown fox " * 50,
]  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "Weather — in °C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}  # fmt: skip
CALL = {
    "id": "c1", "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
}  # fmt: skip


def chat_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for text in TEXTS:
        user = {"role": "user", "content": text}
        system = {"role": "system", "content": "Be brief. " + text[:50]}
        cases += [{"messages": [user]}, {"messages": [system, user]}]
    question = [{"role": "user", "content": "Weather?"}]
    answer = {"role": "assistant", "content": "Sunny "}
    used = [*question, {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "12 °C"}]  # fmt: skip
    cases += [
        {"messages": question, "tools": [TOOL]},
        {"messages": used, "tools": [TOOL, TOOL]},
        {"messages": used},
        {"messages": [*question, answer], "add_generation_prompt": False},
        {"messages": [*question, answer, *question]},
        {"messages": [*question, answer], "add_generation_prompt": False,
         "continue_final_message": True},
        {"messages": question, "documents": [{"title": "t", "text": "ü"}]},
    ]  # fmt: skip
    return cases


REFERENCE = """
import json, sys
sys.modules["torch"] = None  # tokenizers need none of it, and it takes ten seconds
from transformers import AutoTokenizer
job = json.load(sys.stdin)
out = []
for folder in job["folders"]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [tokenizer.apply_chat_template(
        case["messages"], tools=case.get("tools"), documents=case.get("documents"),
        add_generation_prompt=case.get("add_generation_prompt", True),
        continue_final_message=case.get("continue_final_message", False),
        tokenize=True, return_dict=False) for case in job["chats"]]
    out.append({"chats": chats, "texts": [tokenizer(text)["input_ids"] for text in job["texts"]]})
json.dump(out, sys.stdout)
"""


def add_bos(folder: Path) -> None:
    """As Llama's tokenizers: a text gets BOS by the post-processor."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = "<|im_start|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def real_model() -> list[Path]:
    home = Path(os.environ.get("PERILUNE_HOME", Path.home() / ".local/share/perilune"))
    folder = home / "models" / "smollm2"
    return [folder] if (folder / "tokenizer.json").exists() else []


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Callable[..., Path]
) -> list[Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    chatml = make_tokenizer(root / "chatml")
    tools = make_tokenizer(root / "tools", TOOLS_TEMPLATE)
    add_bos(tools)
    return [chatml, tools, *real_model()]


@pytest.fixture(scope="module")
def reference(folders: list[Path]) -> list[dict[str, Any]]:
    job = {"folders": [str(f) for f in folders], "chats": chat_cases(), "texts": TEXTS}
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE], input=json.dumps(job), text=True, capture_output=True,
        timeout=110, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_chats_have_the_librarys_token_ids(
    folders: list[Path], reference: list[dict[str, Any]]
) -> None:
    cases = chat_cases()
    assert len(cases) + len(TEXTS) >= 50
    for folder, expected in zip(folders, reference, strict=True):
        tokenizer = PromptTokenizer(folder)
        for case, ids in zip(cases, expected["chats"], strict=True):
            body = ClientBody(b"", case, chat=True)
            assert tokenizer.tokens(body) == [ids], (folder.name, case)


def test_texts_have_the_librarys_token_ids(
    folders: list[Path], reference: list[dict[str, Any]]
) -> None:
    for folder, expected in zip(folders, reference, strict=True):
        tokenizer = PromptTokenizer(folder)
        for text, ids in zip(TEXTS, expected["texts"], strict=True):
            body = ClientBody(b"", {"prompt": text}, chat=False)
            assert tokenizer.tokens(body) == [ids], (folder.name, text)


class TestReadingOfMessages:
    """How clients' messages become what templates expect."""

    def same(self, tokenizer: PromptTokenizer, one: dict[str, Any], other: dict[str, Any]) -> None:
        left = tokenizer.tokens(ClientBody(b"", one, chat=True))
        right = tokenizer.tokens(ClientBody(b"", other, chat=True))
        assert left == right is not None

    def test_parts_are_joined_by_lines(self, tokenizer_folder: Path) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": ""}, "two"]
        self.same(
            PromptTokenizer(tokenizer_folder),
            {"messages": [{"role": "user", "content": parts}]},
            {"messages": [{"role": "user", "content": "one\ntwo"}]},
        )

    def test_arguments_may_be_json_text(self, folders: list[Path]) -> None:
        def used(arguments: object) -> dict[str, Any]:
            call = {"id": "c", "type": "function",
                    "function": {"name": "f", "arguments": arguments}}  # fmt: skip
            return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}

        tokenizer = PromptTokenizer(folders[1])
        self.same(tokenizer, used('{"a": 1}'), used({"a": 1}))
        self.same(tokenizer, used("no json"), used({}))

    def test_missing_fields_of_tools_are_filled_in(self, folders: list[Path]) -> None:
        short = {"type": "function", "function": {"name": "f"}, "extra": 1}
        full = {"function": {"description": None, "name": "f", "parameters": None}}
        user = [{"role": "user", "content": "x"}]
        self.same(
            PromptTokenizer(folders[1]),
            {"messages": user, "tools": [short]},
            {"messages": user, "tools": [full]},
        )

    def test_developer_is_system_where_the_template_knows_no_such_role(
        self, tokenizer_folder: Path
    ) -> None:
        user = {"role": "user", "content": "x"}
        self.same(
            PromptTokenizer(tokenizer_folder),
            {"messages": [{"role": "developer", "content": "a"}, user]},
            {"messages": [{"role": "system", "content": "a"}, user]},
        )

    @pytest.mark.parametrize(("template", "wants"), [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m['content'] %}x{% endfor %}{% endfor %}", True),
        ("{% set ms = messages[1:] %}{% for m in ms %}{% for c in m.content %}x{% endfor %}"
         "{% endfor %}", True),
        ("{% for t in tools %}{{ t }}{% endfor %}", False),
    ])  # fmt: skip
    def test_templates_say_whether_they_want_parts(self, template: str, wants: bool) -> None:
        assert ChatTemplate(template, {}).wants_parts is wants

    @pytest.mark.parametrize("fields", [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"content": "no role"}]},
        {"messages": "no list"},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": 5},
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"},
        {},
    ])  # fmt: skip
    def test_what_we_cannot_know_is_none(
        self, tokenizer_folder: Path, fields: dict[str, Any]
    ) -> None:
        assert PromptTokenizer(tokenizer_folder).tokens(ClientBody(b"", fields, chat=True)) is None

    def test_templates_cannot_reach_out(self, tokenizer_folder: Path) -> None:
        template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
        with pytest.raises(Exception, match="unsafe"):
            template.render({"messages": []})


MANY = 200_000
PART = {"type": "text", "text": ""}
TEXT = "x" * 1_100_000


@pytest.mark.parametrize("fields", [
    {"prompt": [""] * MANY},
    {"prompt": [[]] * MANY},
    {"prompt": [[1] * 1_100_000]},
    {"prompt": [1] * 1_100_000},
    {"messages": [{"role": "user", "content": ""}] * MANY},
    {"messages": [{"role": "user", "content": [PART] * MANY}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]},
    {"messages": [{"role": "user", "content": [TEXT]}]},
    {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL] * 10_000},
], ids=lambda fields: str(fields)[:40])  # fmt: skip
def test_what_would_hold_all_requests_up_counts_as_too_long(fields: dict[str, Any]) -> None:
    """Whatever a body of 32 MiB is made of: pieces, empty ones too, are work of their own."""
    body = ClientBody(b" " * 100_000, fields, chat="messages" in fields)
    assert prompt_chars(body, 1_000_000) > 1_000_000


def test_usual_prompts_count_about_their_characters() -> None:
    turns = [{"role": "user", "content": "x" * 5_000}, {"role": "user", "content": [PART]}] * 50
    body = ClientBody(b"{}", {"messages": turns, "tools": [TOOL]}, chat=True)
    assert 250_000 <= prompt_chars(body, 1_000_000) < 300_000
    assert prompt_chars(ClientBody(b"{}", {"prompt": "x" * 700}, chat=False), 1_000_000) == 700
    assert prompt_chars(ClientBody(b"{}", {"prompt": 5}, chat=False), 1_000_000) == 0


def test_what_templates_make_of_a_messages_other_fields_counts_as_well() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call] * 5000}
    fields = {"messages": [message]}
    body = ClientBody(json.dumps(fields).encode(), fields, chat=True)
    assert prompt_chars(body, 1_000_000) > 300_000
    message["tool_calls"] = [call] * 500_000
    assert prompt_chars(body, 1_000_000) > 1_000_000
    message |= {"tool_calls": None, "reasoning": "x" * 400_000}
    assert 400_000 <= prompt_chars(body, 1_000_000) < 410_000


def test_what_is_nested_too_deeply_to_be_counted_is_not_tokenised(tokenizer_folder: Path) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    fields = {"messages": [{"role": "user", "content": "hi"}], "tools": deep}
    body = ClientBody(b"x" * 100_000, fields, chat=True)
    assert prompt_chars(body, 1_000_000) > 1_000_000
    arguments = "[" * 100_000 + "]" * 100_000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    fields = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    PromptTokenizer(tokenizer_folder).prepare(ClientBody(b"{}", fields, chat=True))
