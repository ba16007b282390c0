"""Tokens and made-up text of the emulated engine."""

import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

_WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "harbor",
    "inlet",
    "jasper",
    "kelp",
    "lagoon",
    "meadow",
    "north",
    "orchid",
    "pebble",
    "quartz",
    "ridge",
    "summit",
    "tide",
    "umber",
    "valley",
    "willow",
    "xenon",
    "yarrow",
    "zephyr",
]


class Prompts:
    """Turns request bodies into token ids, with a model's own tokenizer where one is given."""

    def __init__(self, model_path: str | None) -> None:
        self._tokenizer: Tokenizer | None = None
        self._template: Any = None
        self._special: dict[str, str] = {}
        if model_path is not None:
            self._load(Path(model_path))

    def _load(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = config.get(name)
            if value is not None:
                self._special[name] = value["content"] if isinstance(value, dict) else value
        template = config.get("chat_template")
        jinja_file = folder / "chat_template.jinja"
        if jinja_file.exists():
            template = jinja_file.read_text()
        if isinstance(template, str):
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
            self._template = environment.from_string(template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; without a tokenizer four bytes make a token."""
        if self._tokenizer is None:
            data = text.encode()
            return [int.from_bytes(data[i : i + 4], "little") & 0x7FFFFFFF
                    for i in range(0, len(data), 4)]  # fmt: skip
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def chat(self, body: dict[str, Any]) -> list[int]:
        """Token ids of a chat's rendered template."""
        messages = [_plain(message) for message in body["messages"]]
        if self._template is None:
            text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        else:
            text = self._template.render(
                messages=messages,
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                **self._special,
            )
        return self.encode(text, add_special_tokens=False)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return {**message, "content": "" if content is None else content}


class Sampler:
    """The deterministic answer to a prompt: token `i` of choice `index`."""

    def __init__(self, tokens: list[int], index: int, seed: int) -> None:
        digest = hashlib.blake2b(repr((tokens, index, seed)).encode(), digest_size=32).digest()
        self._digest = digest
        self.natural_length = 24 + digest[0] % 40

    def word(self, i: int) -> str:
        first = self._digest[i % 32] + 7 * i
        return ("" if i == 0 else " ") + _WORDS[first % len(_WORDS)]
