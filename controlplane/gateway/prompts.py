"""Token ids of a request's prompts, for routing only: the legs carry the client's own fields."""

import asyncio
import json
import os
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jinja2
import msgspec
import structlog
from tokenizers import Tokenizer

from controlplane.gateway.bodies import ClientBody
from controlplane.gateway.chat_template import ChatTemplate, UnsupportedPromptError
from controlplane.gateway.segments import PROBE, WHOLE_TEXTS, Segmenter
from controlplane.gateway.token_cache import DEFAULT_BYTES, TokenCache
from workers.core.errors import ConfigError

log = structlog.get_logger(__name__)

# One thread at most is for long texts; the library's own would take the cores from the workers, and to
# wake them costs more than a short text does.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
            "mask_token")  # fmt: skip
MAX_WAIT_SECONDS = 2.0
"""For the thread; a request goes on without ids after that."""
_NO_TOKENS = (b"", b"")
_UNKNOWN_LENGTH = ("truncate_prompt_tokens", "prompt_embeds", "chat_template")


class Prompt:
    """One prompt in pieces that are tokenised apart; `head` and `tail` are the special tokens that
    the tokenizer puts around a text. `ids` are the pieces', as far as they are known; all are the bytes
    of an array of typecode "i"."""

    __slots__ = ("head", "ids", "pieces", "tail")

    def __init__(self, pieces: list[str], head: bytes, tail: bytes) -> None:
        self.pieces = pieces
        self.ids: list[bytes | None] = []
        self.head = head
        self.tail = tail


Prepared = list[Prompt | list[int]]
"""Of each prompt of a request; one that came as token ids stays as it is."""


class PromptTokenizer:
    """One model's tokenizer and chat template, from a local folder. Ids are cached by piece.

    `prepare` and `finish` are of the event loop's thread; what is `missing` may be encoded in any.
    """

    def __init__(self, folder: Path, cache: TokenCache | None = None, tag: int = 0) -> None:
        """Raises OSError or ValueError when the folder has no usable tokenizer."""
        file = folder / "tokenizer.json"
        try:
            content = file.read_bytes()
            self._tokenizer: Tokenizer = Tokenizer.from_buffer(content)
        except OSError:
            raise
        except Exception as error:  # the library raises bare Exception for bad files
            raise ValueError(f"{file}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = _load_template(folder)
        self._cache = TokenCache() if cache is None else cache
        self._tag = tag
        self._around = self._special_tokens()
        self._segmenter = self._checked(Segmenter(json.loads(content)))

    def tokens(self, body: ClientBody) -> list[list[int]] | None:
        """Token ids of each prompt; None where we cannot know them (the engine will judge)."""
        prepared = self.prepare(body)
        if prepared is None:
            return None
        missing = self.missing(prepared)
        self.learn(missing, self.encode_pieces(missing))
        return [list(tokens) for tokens in self.finish(prepared)]

    # --- in steps, so that the costly one may run elsewhere ---

    def prepare(self, body: ClientBody) -> Prepared | None:
        """Rendered and cut, but not tokenised."""
        fields = body.fields
        if any(fields.get(name) is not None for name in _UNKNOWN_LENGTH):
            return None
        try:
            return self._chat(fields) if body.chat else self._completion(fields)
        except (UnsupportedPromptError, jinja2.TemplateError):
            return None
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError):
            return None  # a malformed body: the engine's error is the client's answer

    def missing(self, prepared: Prepared) -> list[str]:
        """Pieces whose ids are not cached, each once."""
        unknown: dict[str, None] = {}
        for prompt in prepared:
            if isinstance(prompt, Prompt):
                prompt.ids = self._cache.get_all(self._tag, prompt.pieces)
                if None in prompt.ids:
                    both = zip(prompt.pieces, prompt.ids, strict=True)
                    unknown.update([(piece, None) for piece, ids in both if ids is None])
        return list(unknown)

    def encode_pieces(self, pieces: list[str]) -> list[bytes]:
        """The costly step: about 0.3 ms a thousand characters. Touches no cache."""
        encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return [array("i", one.ids).tobytes() for one in encoded]

    def learn(self, pieces: list[str], tokens: list[bytes]) -> None:
        for piece, ids in zip(pieces, tokens, strict=True):
            self._cache.put(self._tag, piece, ids)

    def finish(self, prepared: Prepared) -> list[Sequence[int]]:
        """Ids of each prompt, after `missing`. What is not cached (any more) is encoded now."""
        return [self._joined(p) if isinstance(p, Prompt) else p for p in prepared]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _joined(self, prompt: Prompt) -> "array[int]":
        ids = prompt.ids
        if None in ids:
            for i, piece in enumerate(prompt.pieces):
                if ids[i] is None:
                    known = self._cache.get(self._tag, piece)
                    ids[i] = self.encode_pieces([piece])[0] if known is None else known
        return array("i", b"".join((prompt.head, *cast("list[bytes]", ids), prompt.tail)))

    # --- from a body's fields to pieces ---

    def _chat(self, fields: dict[str, Any]) -> Prepared | None:
        if self._template is None:
            return None
        text = self._template.render(fields)
        # The template has written BOS already where the model wants one.
        return [self._prompt(text, fields.get("add_special_tokens", False))]

    def _completion(self, fields: dict[str, Any]) -> Prepared | None:
        prompt = fields.get("prompt")
        special = fields.get("add_special_tokens", True)
        if isinstance(prompt, str):
            return [self._prompt(prompt, special)]
        if not isinstance(prompt, list) or not prompt:
            return None
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return [self._prompt(text, special) for text in prompt]
        if all(isinstance(item, list) and all(type(t) is int for t in item) for item in prompt):
            return list(prompt)
        return None

    def _prompt(self, text: str, special: object) -> Prompt:
        head, tail = self._around if special else _NO_TOKENS
        return Prompt(self._segmenter.segments(text), head, tail)

    # --- what is found out when it is loaded ---

    def _special_tokens(self) -> tuple[bytes, bytes]:
        """What the post-processor puts before and after a text. Raises ValueError."""
        found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for text in ("a", "harbour 12"):
            plain = self.encode(text, add_special_tokens=False)
            whole = self.encode(text, add_special_tokens=True)
            start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
            if start is None:
                raise ValueError("its post-processor does more than to put tokens around a text")
            found.add((tuple(whole[:start]), tuple(whole[start + len(plain) :])))
        if len(found) != 1:
            raise ValueError("its post-processor puts different tokens around different texts")
        head, tail = found.pop()
        return array("i", head).tobytes(), array("i", tail).tobytes()

    def _checked(self, segmenter: Segmenter) -> Segmenter:
        """Tried on a text of many kinds; one that fails is not used (whole texts are, then)."""
        pieces = segmenter.segments(PROBE)
        joined = array("i", b"".join(self.encode_pieces(pieces))).tolist()
        if joined == self.encode(PROBE, add_special_tokens=False):
            return segmenter
        log.warning("tokenizer_not_cut", effect="token ids are cached by whole text only")
        return Segmenter(WHOLE_TEXTS)


PROMPT_CHARS, MESSAGE_CHARS, PART_CHARS = 100, 200, 30
"""What a prompt, a message or a part of one costs beside its text, in characters to encode: what
is made of each of very many would hold the event loop up for seconds."""
MANY_BYTES = 64 * 1024
"""Of a shorter body only texts are counted."""
_BESIDE = ("tool_calls", "tools", "reasoning", "reasoning_content")


def prompt_chars(body: ClientBody, most: int) -> int:
    """Characters to tokenise, roughly: long prompts go to a thread, those of more than `most`
    nowhere, so that these are counted no further."""
    fields = body.fields
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return len(prompt) if len(prompt) > most else sum(map(_prompt_chars, prompt))
    if not isinstance(messages, list):
        return 0
    if (least := MESSAGE_CHARS * len(messages)) > most:
        return least
    beside = 0
    if len(body.raw) > MANY_BYTES:
        beside = sum(_value_chars(fields.get(name), most) for name in ("tools", "documents"))
        beside += sum(_beside_chars(message, most) for message in messages)
    return beside + sum(map(_message_chars, messages))


def num_ids(body: ClientBody) -> int:
    """Of the longest prompt that came as token ids, which have a length without a tokenizer."""
    fields = body.fields
    prompt = fields.get("prompt")
    if body.chat or body.passed or not isinstance(prompt, list) or not prompt:
        return 0
    if any(fields.get(name) is not None for name in _UNKNOWN_LENGTH):
        return 0
    if type(prompt[0]) is int:
        return len(prompt)
    return max(len(ids) if isinstance(ids, list) else 0 for ids in prompt)


def _beside_chars(message: object, most: int) -> int:
    """What templates make of a message's other fields."""
    if not isinstance(message, dict):
        return 0
    return sum(_value_chars(message[name], most) for name in _BESIDE if name in message)


def _value_chars(value: object, most: int) -> int:
    if isinstance(value, str):
        return len(value)
    parts = PART_CHARS * len(value) if isinstance(value, list) else 0
    if parts > most:
        return parts
    try:
        return parts + len(msgspec.json.encode(value))
    except RecursionError:
        return most + 1


def _prompt_chars(prompt: object) -> int:
    return len(prompt) + PROMPT_CHARS if isinstance(prompt, str | list) else 1


def _message_chars(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return MESSAGE_CHARS + len(content)
    if not isinstance(content, list):
        return MESSAGE_CHARS
    return MESSAGE_CHARS + sum(map(_part_chars, content))


def _part_chars(part: object) -> int:
    text = part.get("text") if isinstance(part, dict) else part
    return PART_CHARS + (len(text) if isinstance(text, str) else 0)


class Tokenizers:
    """Tokenizers by model path, loaded once each, in a thread. `close` ends the thread.

    Long texts are encoded there, too, up to a bound of characters that wait.
    """

    def __init__(self, cache_bytes: int = DEFAULT_BYTES) -> None:
        self._by_path: dict[str, PromptTokenizer | None] = {}
        self._tags: dict[str, int] = {}
        self.cache = TokenCache(cache_bytes)
        self.pending_chars = 0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    def get(self, path: str) -> PromptTokenizer | None:
        """None while it is not loaded, or if the folder has none."""
        return self._by_path.get(path)

    def load(self, path: str) -> None:
        """Blocking; safe to call again."""
        if not path or self._by_path.get(path) is not None:
            return
        try:
            tag = self._tags.setdefault(path, len(self._tags))
            self._by_path[path] = PromptTokenizer(Path(path), self.cache, tag)
        except (OSError, ValueError, ConfigError) as error:
            self._by_path[path] = None
            log.warning("no_tokenizer", path=path, error=str(error), effect="no prefix routing")

    def keep(self, paths: set[str]) -> None:
        """Forget models that left."""
        for gone in self._by_path.keys() - paths:
            del self._by_path[gone]
            self.cache.forget(self._tags.get(gone, -1))

    async def tokens(
        self, tokenizer: PromptTokenizer, body: ClientBody, inline_chars: int, max_chars: int
    ) -> list[Sequence[int]] | None:
        """Ids of each prompt. What is not cached is encoded in the thread from `inline_chars` on.

        None: they cannot be known, more than `max_chars` characters would wait for the thread, or
        it took too long; what it finds later still goes into the cache.
        """
        prepared = tokenizer.prepare(body)
        if prepared is None:
            return None
        missing = tokenizer.missing(prepared)
        if not missing:
            return tokenizer.finish(prepared)
        chars = sum(map(len, missing))
        if chars <= inline_chars:
            tokenizer.learn(missing, tokenizer.encode_pieces(missing))
        elif self.pending_chars + chars > max_chars:
            return None
        else:
            try:
                async with asyncio.timeout(MAX_WAIT_SECONDS):
                    await asyncio.shield(self._encode(tokenizer, missing, chars))
            except TimeoutError:
                return None
        return tokenizer.finish(prepared)

    def _encode(
        self, tokenizer: PromptTokenizer, pieces: list[str], chars: int
    ) -> "asyncio.Future[list[bytes]]":
        """In the thread; what comes of it is cached, whoever still waits."""
        self.pending_chars += chars
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self.thread, tokenizer.encode_pieces, pieces)

        def done(_: "asyncio.Future[list[bytes]]") -> None:
            self.pending_chars -= chars
            if not job.cancelled() and job.exception() is None:
                tokenizer.learn(pieces, job.result())

        job.add_done_callback(done)
        return job

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
