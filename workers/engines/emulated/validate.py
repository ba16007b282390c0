"""Request bodies of /v1: checked as vLLM checks them, with its error shapes."""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec

from workers.core.transfer_messages import HolderRef
from workers.engines.emulated.text import Prompts
from workers.engines.emulated.worker import EngineConfig, Transfer

MAX_CHOICES = 16_384  # vLLM's own bound
MAX_TOKEN_ID = 2**31 - 1
_FOREIGN = {"do_remote_decode", "do_remote_prefill"}  # NIXL's connector, as routers drive it


class RefusedRequest(Exception):  # noqa: N818 - an answer to the client, not a fault of ours
    """An OpenAI-style error body with its HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        kind = "NotFoundError" if status == 404 else "BadRequestError"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request."""

    chat: bool
    prompts: list[list[int]]
    stream: bool
    include_usage: bool
    num_choices: int  # per prompt
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    echo: bool
    logprobs: int | None
    seed: int
    salt: str
    transfer: Transfer
    has_transfer: bool


def parse(body: bytes, *, chat: bool, config: EngineConfig, prompts: Prompts) -> Generation:
    """Raises `RefusedRequest` as vLLM would answer."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise RefusedRequest(400, f"JSON decode error: {error}") from error
    if not isinstance(fields, dict):
        raise RefusedRequest(400, "Input should be a valid dictionary")
    model = fields.get("model")
    if model not in (None, config.model):
        raise RefusedRequest(404, f"The model `{model}` does not exist.", "model")
    token_lists = _chat_tokens(fields, prompts) if chat else _prompt_tokens(fields, prompts)
    longest = max(len(tokens) for tokens in token_lists)
    max_tokens = _max_tokens(fields, chat, config.max_model_len - longest)
    if longest + max_tokens > config.max_model_len:
        raise RefusedRequest(
            400,
            f"This model's maximum context length is {config.max_model_len} tokens. However, you "
            f"requested {max_tokens} output tokens and your prompt contains {longest} input tokens.",
        )
    return _checked(fields, chat, token_lists, max_tokens)


def _checked(
    fields: dict[str, Any], chat: bool, token_lists: list[list[int]], max_tokens: int
) -> Generation:
    stream = _boolean(fields, "stream")
    options = fields.get("stream_options")
    if options is not None and not stream:
        raise RefusedRequest(400, "Stream options can only be defined when `stream=True`.")
    min_tokens = _integer(fields, "min_tokens", 0, least=0)
    if min_tokens > max_tokens:
        raise RefusedRequest(
            400,
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.",
        )
    transfer, has_transfer = _transfer(fields)
    return Generation(
        chat=chat,
        prompts=token_lists,
        stream=stream,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        num_choices=_integer(fields, "n", 1, least=1, most=MAX_CHOICES),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=_boolean(fields, "ignore_eos"),
        echo=_boolean(fields, "echo"),
        logprobs=_logprobs(fields, chat),
        seed=_integer(fields, "seed", 0, least=-(2**63)),
        salt=_salt(fields),
        transfer=transfer,
        has_transfer=has_transfer,
    )


def _prompt_tokens(fields: dict[str, Any], prompts: Prompts) -> list[list[int]]:
    prompt = fields.get("prompt")
    special = _boolean(fields, "add_special_tokens", default=True)
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RefusedRequest(400, "Either prompt or prompt_embeds must be provided and non-empty.")
    if all(isinstance(item, int) for item in prompt):
        prompt = [prompt]
    if all(isinstance(item, str) for item in prompt):
        prompt = [prompts.encode(text, add_special_tokens=special) for text in prompt]
    for tokens in prompt:
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise RefusedRequest(
                400, "Input should be a valid string or a list of integers", "prompt"
            )
        if not tokens:
            raise RefusedRequest(400, "The decoder prompt cannot be empty", "prompt")
        if min(tokens) < 0 or max(tokens) > MAX_TOKEN_ID:
            raise RefusedRequest(400, f"Token id {max(tokens)} is out of vocabulary", "prompt")
    return prompt


def _chat_tokens(fields: dict[str, Any], prompts: Prompts) -> list[list[int]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedRequest(400, "messages: Input should be a valid list of messages", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RefusedRequest(400, "messages: each message needs a role", "messages")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise RefusedRequest(400, "content: Input should be a valid string", "messages")
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise RefusedRequest(400, f"{fields.get('model')} is not a multimodal model")
            if not isinstance(part.get("text", ""), str):
                raise RefusedRequest(
                    400, "content.text: Input should be a valid string", "messages"
                )
    return [prompts.chat(fields)]


def _max_tokens(fields: dict[str, Any], chat: bool, room: int) -> int:
    default = max(room, 1) if chat else 16
    if chat and fields.get("max_completion_tokens") is not None:
        return _integer(fields, "max_completion_tokens", default, least=1)
    return _integer(fields, "max_tokens", default, least=1)


def _logprobs(fields: dict[str, Any], chat: bool) -> int | None:
    if not chat:
        return None if fields.get("logprobs") is None else _integer(fields, "logprobs", 0, least=0)
    wanted = _boolean(fields, "logprobs")
    top = _integer(fields, "top_logprobs", 0, least=0)
    if top > 0 and not wanted:
        raise RefusedRequest(400, "when using `top_logprobs`, `logprobs` must be set to true.")
    return top if wanted else None


def _salt(fields: dict[str, Any]) -> str:
    salt = fields.get("cache_salt")
    if salt is None:
        return ""
    if not isinstance(salt, str) or not salt:
        raise RefusedRequest(400, "cache_salt must be a non-empty string", "cache_salt")
    return salt


def _transfer(fields: dict[str, Any]) -> tuple[Transfer, bool]:
    params = fields.get("kv_transfer_params")
    if params is None:
        return Transfer(), False
    ours = params.get("perilune") if isinstance(params, dict) else None
    if ours is None and isinstance(params, dict) and _FOREIGN & params.keys():
        leg = "prefill" if params.get("do_remote_decode") else "decode"
        return Transfer(f"foreign-{uuid4().hex}", leg, foreign=True), True
    if not isinstance(ours, dict):
        raise RefusedRequest(400, "kv_transfer_params: Input should be a valid dictionary")
    session = ours.get("session")
    return Transfer(
        ours["transfer_id"],
        ours["leg"],
        ours.get("num_blocks", 0),
        session if session in ("continue", "over") else "",
        _holder(ours.get("holder")),
        str(ours.get("tenant") or ""),
        str(ours.get("label") or ""),
        target=_holder(ours.get("target")),
    ), True


def _holder(value: object) -> HolderRef | None:
    try:
        return msgspec.convert(value, HolderRef)
    except msgspec.ValidationError:
        return None


def _integer(
    fields: dict[str, Any], name: str, default: int, *, least: int, most: int | None = None
) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise RefusedRequest(400, f"{name}: Input should be a valid integer", name)
    if value < least:
        raise RefusedRequest(400, f"{name} must be at least {least}, got {value}.", name)
    if most is not None and value > most:
        raise RefusedRequest(400, f"{name} must be at most {most}, got {value}.", name)
    return value


def _boolean(fields: dict[str, Any], name: str, *, default: bool = False) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RefusedRequest(400, f"{name}: Input should be a valid boolean", name)
    return value
