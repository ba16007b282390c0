"""Request bodies: what is read of them, and the bodies of the two legs. Pure functions.

Leg 1 asks for one token of the same prompt; leg 2 is the client's own bytes with our transfer
parameters put in front.
"""

import hashlib
import re
from codecs import BOM_UTF8 as _MARK
from collections.abc import Mapping, Sequence
from json import detect_encoding
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from controlplane.core.normalisation import Rule, normalised
from controlplane.gateway.answers import AnswerError

DEFAULT_TENANT = "default"
_CAPS = (
    "max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens",
    "max_tokens_to_sample",
)  # fmt: skip
_NOT_FOR_PREFILL = (
    "stream_options", "min_tokens", "min_completion_tokens", "best_of", "logprobs",
    "top_logprobs", "logprob_token_ids", "prompt_logprobs", "echo", "use_beam_search",
    "return_token_ids", "return_prompt_text", "stream_interval",
)  # fmt: skip
_IF_TRUE = ("echo", "prompt_embeds", "use_beam_search", "ec_transfer_params")
_WHOLE_ON_DECODE = frozenset((*_IF_TRUE, "prompt_logprobs", "truncate_prompt_tokens"))
_MEDIA = ("image_url", "video_url", "audio_url")
_USUAL_STARTS = (b"{", b" ", b"\n", b"\r", b"\t", b"[")
_HALF_PAIR: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]{0,4}}\s*\Z)", re.DOTALL
)
_YES = frozenset(("true", "1", "yes", "y", "on", "t"))
Session = Literal["", "continue", "over"]
_LABEL: Final = re.compile(rb"[a-z0-9._-]{1,32}")
_SESSIONS: Final[dict[bytes, Session]] = {b"continue": "continue", b"over": "over"}
_OURS = frozenset(("kv_transfer_params", "cache_salt"))
_NOT_COPIED = frozenset(_NOT_FOR_PREFILL)
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class ClientBody(msgspec.Struct):
    """A client's body: its bytes, and the fields decoded."""

    raw: bytes
    fields: dict[str, Any]
    chat: bool
    passed: bool = False  # of a route that is not split
    stream: bool = False
    is_refused: bool = False  # too long for the engine: it says so itself, and no leg 1 runs

    @property
    def model(self) -> object:
        return self.fields.get("model")

    @property
    def unsplit(self) -> bool:
        """Served whole by the decode worker: two legs cannot, or would gain nothing.

        Log-probabilities of the prompt and embeddings: who answers must compute the prompt (A19).
        Echo without output, beam search, truncation to what the cap leaves: leg 1 would be about
        another prompt, or refused. Media to be fetched: from one place and once (A24).
        """
        fields = self.fields
        if self.passed or self.is_refused:
            return True
        if not _WHOLE_ON_DECODE.isdisjoint(fields) and (
            any(fields.get(name) for name in _IF_TRUE)
            or fields.get("prompt_logprobs") is not None
            or _is_negative(fields.get("truncate_prompt_tokens"))
        ):
            return True
        return self.chat and _has_remote_media(fields.get("messages"))

    @property
    def num_sequences(self) -> int:
        """Answers that it asks for, each of which loads its prompt's KV for itself."""
        choices, prompt = self.fields.get("n"), self.fields.get("prompt")
        num_prompts = 1
        if not self.chat and isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            num_prompts = len(prompt)
        return num_prompts * _count(choices)

    @property
    def output_cap(self) -> int:
        """Tokens that the engine reserves for the answer, as far as can be told."""
        fields, default = self.fields, 1 if self.chat else 16
        cap = fields.get("max_tokens")
        if self.chat and fields.get("max_completion_tokens") is not None:
            cap = fields["max_completion_tokens"]
        return cap if isinstance(cap, int) else default


def parse(raw: bytes, *, chat: bool, passed: bool = False) -> ClientBody:
    """Raises `AnswerError` 400 for what is no JSON object; field types are the engine's to judge."""
    raw = _as_utf8(raw)
    try:
        fields = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the body is no valid JSON: {_half_pair(raw, error) or error}"
        raise AnswerError(400, message, "malformed_json") from None
    except RecursionError:
        raise AnswerError(400, "the body is nested too deeply", "malformed_json") from None
    if not isinstance(fields, dict):
        kind = type(fields).__name__
        message = f"the body must be a JSON object, this is a {kind}"
        raise AnswerError(400, message, "malformed_json")
    stream = fields.get("stream")
    is_stream = stream is True or (stream is not None and is_yes(stream))
    return ClientBody(raw, fields, chat, passed, is_stream)


def _half_pair(raw: bytes, error: Exception) -> str:
    """Half of a surrogate pair so near the end that the reader takes the body for a part of one."""
    found = _HALF_PAIR.search(raw, max(0, len(raw) - 64))
    if found is None or "truncated" not in str(error):
        return ""
    return (
        f"JSON is malformed: unexpected end of escaped utf-16 surrogate pair (byte {found.end()})"
    )


def with_rules(body: ClientBody, rules: Sequence[Rule]) -> list[Rule]:
    """Bring the body's texts to one form, for both legs; which rules changed something."""
    fields, applied = normalised(body.fields, rules, chat=body.chat)
    if applied:
        body.fields, body.raw = fields, _encode(fields)
    return applied


def prompt_text(body: ClientBody) -> bytes:
    """What of the body makes up its prompt: equal heads for equal beginnings."""
    fields = body.fields
    if body.chat:
        return _encode(fields.get("tools")) + _encode(fields.get("messages"))
    prompt = fields.get("prompt")
    return prompt.encode() if isinstance(prompt, str) else _encode(prompt)


def _as_utf8(raw: bytes) -> bytes:
    """JSON may come in UTF-16 or UTF-32, or after a byte-order mark: engines take that."""
    if raw[:1] in _USUAL_STARTS and raw[1:2] != b"\0":
        return raw
    encoding = detect_encoding(raw)
    if encoding in ("utf-8", "utf-8-sig"):
        return raw.removeprefix(_MARK)
    try:
        return raw.decode(encoding).encode()
    except UnicodeError as error:
        raise AnswerError(400, f"the body is no valid JSON: {error}", "malformed_json") from None


def legs_salt(tenant: str, client_salt: object) -> str | None:
    """`cache_salt` of the legs: none for the default tenant without a salt of its own.

    A salt that no engine accepts is left alone, so that the engine says so.
    """
    own = client_salt if isinstance(client_salt, str) else ""
    if tenant == DEFAULT_TENANT and not own:
        return None
    parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, own)]
    text = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return hashlib.blake2b(text, digest_size=32, person=b"perilune-salt").hexdigest()


def has_illegal_salt(client_salt: object) -> bool:
    """Neither absent nor a text of 1 to 1024 characters."""
    if client_salt is None:
        return False
    return not isinstance(client_salt, str) or not 0 < len(client_salt) <= 1024


class Holder(msgspec.Struct, frozen=True):
    """The node that a leg's worker may have blocks pulled from, and which life of it."""

    node_id: str
    endpoint: str
    incarnation: int = 0


class LegParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """`kv_transfer_params.perilune` of a leg.

    `num_blocks`: of leg 2, what it may load; of leg 1, what the holder has.
    """

    transfer_id: str
    leg: Literal["prefill", "decode"]
    num_blocks: int | None = None
    session: Session = ""
    holder: Holder | None = None
    label: str = ""  # the request's class, as its client names it
    target: Holder | None = None  # of leg 1: the node of leg 2, where blocks may be pushed to
    tenant: str = ""  # whose quota the blocks count against; "" for the default tenant


def session_of(headers: dict[bytes, bytes]) -> Session:
    """The client's hint whether its session goes on; anything else is no hint."""
    asked = headers.get(b"x-perilune-session")
    return "" if asked is None else _SESSIONS.get(asked.strip().lower(), "")


def label_of(headers: dict[bytes, bytes]) -> str:
    """`x-perilune-class`: up to 32 of a-z, 0-9, dot, dash and underscore; anything else is none."""
    asked = headers.get(b"x-perilune-class")
    if asked is None:
        return ""
    found = _LABEL.fullmatch(asked.strip().lower())
    return found[0].decode() if found else ""


KvParams = dict[str, Any]
"""The value of `kv_transfer_params`: ours, or what a foreign engine's connector reads."""


def ours(params: LegParams) -> KvParams:
    """`kv_transfer_params` of workers with our connector."""
    return {"perilune": params}


def prefill_leg(
    body: ClientBody,
    kv: KvParams | None,
    salt: str | None,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """Leg 1: one token, one choice, no stream. Without `kv`, no transfer parameters at all.

    `more`: fields that its connector needs.
    """
    fields = body.fields.copy()
    if not _NOT_COPIED.isdisjoint(fields):
        for name in _NOT_FOR_PREFILL:
            fields.pop(name, None)
    caps = fields.keys() & _CAPS
    for name in caps:
        cap = fields[name]
        fields[name] = 1 if type(cap) is int and cap > 0 else _one(cap)
    if not caps:
        fields["max_completion_tokens" if body.chat else "max_tokens"] = 1
    fields.update(more)
    if "n" in fields:
        fields["n"] = _one(fields["n"])
    if body.stream:
        fields["stream"] = False
    choice = fields.get("tool_choice")
    if choice is not None and (choice == "required" or isinstance(choice, dict)):
        fields["tool_choice"] = "none"  # one token is no tool call; the prompt stays the same
    if kv is not None:
        fields["kv_transfer_params"] = kv
    else:
        fields.pop("kv_transfer_params", None)  # not the client's to say
    if salt is not None and not has_illegal_salt(fields.get("cache_salt")):
        fields["cache_salt"] = salt
    return _encode(fields)


def decode_leg(body: ClientBody, kv: KvParams | None, salt: str | None) -> bytes:
    """Leg 2: the client's bytes, with only our own fields added."""
    added: dict[str, Any] = {}
    if kv is not None:
        added["kv_transfer_params"] = kv
    if salt is not None and not has_illegal_salt(body.fields.get("cache_salt")):
        added["cache_salt"] = salt
    if not _OURS.isdisjoint(body.fields):
        fields = {n: v for n, v in body.fields.items() if n != "kv_transfer_params"}
        return _encode({**fields, **added})
    if not added:
        return body.raw
    start = body.raw.index(b"{")
    rest = body.raw[start + 1 :]
    comma = b"," if body.fields else b""
    return _encode(added)[:-1] + comma + rest


def is_yes(value: object) -> bool:
    """Whether engines read it as true: their bodies are pydantic's, which takes more than `true`."""
    if isinstance(value, str):
        return value.lower() in _YES
    return value in (True, 1)


def _is_negative(value: object) -> bool:
    return isinstance(value, int) and value < 0


def _has_remote_media(messages: object) -> bool:
    """Whether some part is a URL that the engine would have to fetch."""
    if not isinstance(messages, list):
        return False
    return any(
        _is_remote(part)
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict)
    )


def _is_remote(part: dict[str, Any]) -> bool:
    for name in _MEDIA:
        link = part.get(name)
        url = link.get("url") if isinstance(link, dict) else link
        if isinstance(url, str) and not url.startswith("data:"):
            return True
    return False


def _one(value: object) -> object:
    """1 for what engines read as a count (5, 5.0, "5"); the rest stays, for them to refuse."""
    return 1 if value is None or _is_count(value) else value


def _count(value: Any) -> int:
    return int(float(value)) if _is_count(value) else 1


def _is_count(value: object) -> bool:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return False
    if isinstance(value, float):
        return value >= 1 and value.is_integer()
    return isinstance(value, int) and value >= 1
