"""Token ids of a request's prompts, for routing only: the legs carry the client's own fields."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import structlog
from tokenizers import Tokenizer

from controlplane.gateway.bodies import ClientBody
from controlplane.gateway.chat_template import ChatTemplate, UnsupportedPromptError
from workers.core.errors import ConfigError

log = structlog.get_logger(__name__)

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
            "mask_token")  # fmt: skip
_UNKNOWN_LENGTH = ("truncate_prompt_tokens", "prompt_embeds", "chat_template")


class PromptTokenizer:
    """One model's tokenizer and chat template, from a local folder."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError or ValueError when the folder has no usable tokenizer."""
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except OSError:
            raise
        except Exception as error:  # the library raises bare Exception for bad files
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = _load_template(folder)

    def tokens(self, body: ClientBody) -> list[list[int]] | None:
        """Token ids of each prompt; None where we cannot know them (the engine will judge)."""
        fields = body.fields
        if any(fields.get(name) is not None for name in _UNKNOWN_LENGTH):
            return None
        try:
            if body.chat:
                return self._chat(fields)
            return self._completion(fields)
        except (UnsupportedPromptError, jinja2.TemplateError):
            return None
        except (KeyError, TypeError, AttributeError, ValueError, IndexError):
            return None  # a malformed body: the engine's error is the client's answer

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _chat(self, fields: dict[str, Any]) -> list[list[int]] | None:
        if self._template is None:
            return None
        text = self._template.render(fields)
        # The template has written BOS already where the model wants one.
        special = fields.get("add_special_tokens", False)
        return [self.encode(text, add_special_tokens=special)]

    def _completion(self, fields: dict[str, Any]) -> list[list[int]] | None:
        prompt = fields.get("prompt")
        special = fields.get("add_special_tokens", True)
        if isinstance(prompt, str):
            return [self.encode(prompt, add_special_tokens=special)]
        if not isinstance(prompt, list) or not prompt:
            return None
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return [self.encode(text, add_special_tokens=special) for text in prompt]
        if all(isinstance(item, list) and all(type(t) is int for t in item) for item in prompt):
            return prompt
        return None


def prompt_chars(fields: dict[str, Any]) -> int:
    """Characters to tokenise, roughly: long prompts go to a thread."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return sum(len(item) for item in prompt if isinstance(item, str))
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return 0
    return sum(
        len(content) if isinstance(content := message.get("content"), str) else 1000
        for message in messages
        if isinstance(message, dict)
    )


class Tokenizers:
    """Tokenizers by model path, loaded once each, in a thread. `close` ends the thread."""

    def __init__(self) -> None:
        self._by_path: dict[str, PromptTokenizer | None] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    def get(self, path: str) -> PromptTokenizer | None:
        """None while it is not loaded, or if the folder has none."""
        return self._by_path.get(path)

    def load(self, path: str) -> None:
        """Blocking; safe to call again."""
        if not path or self._by_path.get(path) is not None:
            return
        try:
            self._by_path[path] = PromptTokenizer(Path(path))
        except (OSError, ValueError, ConfigError) as error:
            self._by_path[path] = None
            log.warning("no_tokenizer", path=path, error=str(error), effect="no prefix routing")

    def keep(self, paths: set[str]) -> None:
        """Forget models that left."""
        for gone in self._by_path.keys() - paths:
            del self._by_path[gone]

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


def _load_template(folder: Path) -> ChatTemplate | None:
    config = _read_json(folder / "tokenizer_config.json")
    special: dict[str, str] = {}
    for name in _SPECIAL:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            special[name] = value
    text: object = config.get("chat_template")
    if isinstance(text, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in text}
        text = named.get("default")
    file = folder / "chat_template.jinja"
    if file.exists():
        text = file.read_text(encoding="utf-8")
    return ChatTemplate(text, special) if isinstance(text, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError(str(path), kind, "must hold a JSON object", "Copy the model again.")
    return content
