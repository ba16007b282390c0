"""The two legs of one request on the wire: one try each, with its outcome in words."""

import json
import re
from collections.abc import Mapping
from time import monotonic
from typing import Any, Literal, Self

import msgspec

from controlplane.gateway.answers import AnswerError, error_body
from controlplane.gateway.asked import Asked
from controlplane.gateway.encodings import TooLargeError, inflate, is_undone, peek
from controlplane.gateway.events import (
    DONE_MARKS,
    ERROR_DATA,
    FIELDS,
    MAX_EVENT_BYTES,
    ends_event,
    is_event,
    may_become_event,
    past_comments,
)
from controlplane.gateway.request_headers import IS_TOLD, TOLD
from controlplane.gateway.settings import Settings
from controlplane.gateway.several_lines import tokens
from controlplane.gateway.upstream import Reply, UpstreamError
from controlplane.gateway.usage import count
from controlplane.gateway.worker_state import WorkerState

PassedHeaders = bytes
_NOT_TO_CLIENT = frozenset((
    b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade",
    b"proxy-connection", b"content-length", b"content-type", b"date", b"server", b"x-request-id",
))  # fmt: skip
_STATUS = {"timeout": 504, "hung": 504, "connect": 503}
_ERROR_EVENT = re.compile(ERROR_DATA)
MAX_SHOWN = 200
HOLD_SECONDS = 1.0
"""How long comments before a stream's first event wait for it: then they go out, which begins the
client's answer. Lines are kept alive by tens of seconds."""
_decode = msgspec.json.Decoder().decode


class LegError(Exception):
    """A try that another worker may still serve. `unreachable`: refused or reset at once.
    `was_sent`: the worker may have got it, and have taken what leg 1 had staged. `answered`: an
    error is what it said to it, and it may be the request's doing. `refused`: nobody was there."""

    def __init__(
        self, message: str, status: int, *, unreachable: bool, was_sent: bool = True,
        answered: bool = False, refused: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.answered = answered
        self.refused = refused
        self.status = status
        self.unreachable = unreachable
        self.was_sent = was_sent


class WorkerAnswer(msgspec.Struct, frozen=True, gc=False):
    """A whole reply of a worker, to be passed on as it is."""

    status: int
    content_type: bytes
    headers: bytes
    body: bytes


class ClientFault(Exception):  # noqa: N818 - an answer, not a failure of ours
    """The engine refused the request: its answer is the client's, unchanged (I7)."""

    def __init__(self, answer: WorkerAnswer, worker_id: str) -> None:
        super().__init__(answer.status)
        self.answer = answer
        self.worker_id = worker_id

    def said(self, request_id: str, leg: str = "") -> WorkerAnswer:
        """Words of ours where the engine gave none."""
        answer, name = self.answer, self.worker_id
        if answer.body.strip():
            return answer
        what = f"the {leg} leg of request {request_id}" if leg else f"request {request_id}"
        message = f"worker {name} refused {what} with status {answer.status} and gave no reason"
        about = {"request_id": request_id, "leg": leg, "worker": name}
        body = error_body(answer.status, f"{message}; see its log", "refused", None, about)
        return WorkerAnswer(answer.status, b"application/json", answer.headers, body)


class PrefillReply(msgspec.Struct, frozen=True, gc=False):
    """What leg 1 said."""

    num_blocks: int | None  # None: the worker gave no transfer parameters
    prompt_tokens: int | None
    cached_tokens: int | None
    params: dict[str, Any] | None = None  # a foreign connector's, for leg 2 as they came
    details: dict[str, Any] | None = None  # of its prompt tokens: what the client is told


class LegRequest(msgspec.Struct):
    """A request for one worker; `sent` when it has it already."""

    worker: WorkerState
    request: bytes
    sent: Reply | None = None

    def send_now(self, *, wants_piece: bool = False) -> Self:
        """At once where a connection is kept; else `LegSender` sends it. As a context: what fails
        within it takes the request back, since nobody waits for its reply then."""
        self.sent = self.worker.upstream.send_now(self.request, wants_piece=wants_piece)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.sent is not None:
            self.sent.abort()


class LegSender:
    """Sends bodies to workers. Raises `LegError`, or `ClientFault` for a 4xx."""

    def __init__(self, settings: Settings) -> None:
        self._timeouts = settings.timeouts
        self._limits = settings.limits

    async def whole(
        self, worker: WorkerState, path: bytes, head: bytes, body: bytes, content_type: bytes
    ) -> WorkerAnswer:
        """A request that is no leg."""
        seconds = self._timeouts.prefill
        leg = LegRequest(worker, request_of(worker, path, head, body, content_type))
        reply, answer = await self.exchange(leg, seconds)
        if _is_json(reply):
            check_answer(reply, answer)
        return _worker_answer(reply, answer)

    async def decode_stream(self, leg: LegRequest, *, is_split: bool) -> tuple[Reply, bytes]:
        """Leg 2 of a stream, up to its first event; the whole answer where that is no stream.
        `is_split`: its route has streams of events only, and JSON with choices."""
        seconds = self._timeouts.first_byte
        try:
            reply = await leg.worker.upstream.send(
                leg.request, head_seconds=seconds, wants_piece=True, sent=leg.sent
            )
        except UpstreamError as error:
            raise leg_error(error) from error
        try:
            first = await self._first_piece(leg, reply, seconds, is_split=is_split)
        except BaseException:
            reply.abort()
            raise
        return reply, first

    async def _first_piece(
        self, leg: LegRequest, reply: Reply, seconds: float, *, is_split: bool
    ) -> bytes:
        if reply.status != 200:
            await self._whole(leg, reply, seconds)  # raises for 4xx and 5xx
            raise LegError(f"answered {reply.status} to a stream", 502, unreachable=False)
        if is_no_stream(reply):
            return await self._whole_answer(leg, reply, b"", seconds, is_split=is_split)
        try:
            first = await reply.first_piece(seconds)
        except UpstreamError as error:
            raise leg_error(error) from error
        if not first:
            raise LegError("ended the stream before its first byte", 502, unreachable=False)
        if first.startswith(b"data:") and first.endswith(b"\n\n"):  # the usual case
            _check_first(first)
            return first
        if b"content-encoding" not in reply.headers:
            first = await self._first_event(reply, first, seconds, is_split=is_split)
        if is_no_stream(reply, _plain(reply, first), is_split=is_split):
            return await self._whole_answer(leg, reply, first, seconds, is_split=is_split)
        _check_first(past_comments(first))
        return first

    async def _whole_answer(
        self, leg: LegRequest, reply: Reply, begun: bytes, seconds: float, *, is_split: bool
    ) -> bytes:
        """Of a reply that is no stream, of which something may have been read."""
        body = await self._whole(leg, reply, seconds, begun)
        check_answer(reply, body, is_object=is_split)
        return body

    async def _first_event(
        self, reply: Reply, first: bytes, seconds: float, *, is_split: bool
    ) -> bytes:
        """What has begun to come as a stream, until an event with data is whole, or it shows
        itself as none. Comments keep a client's line alive, and begin its answer, after which no
        other worker can be asked: they wait so long for what comes right behind them, and no more."""
        hold_until = 0.0
        while not is_event(data := past_comments(first)) and len(first) < MAX_EVENT_BYTES:
            if _is_as_it_is(reply, first, data, is_split=is_split):
                return first
            hold = None
            if len(data) < len(first) and ends_event(first):
                hold_until = hold_until or monotonic() + HOLD_SECONDS
                hold = hold_until - monotonic()
                if hold <= 0:
                    return first
            try:
                first += await reply.first_piece(seconds, hold)
            except UpstreamError as error:
                raise leg_error(error) from error
        return first

    async def exchange(self, leg: LegRequest, seconds: float) -> tuple[Reply, bytes]:
        """A 200 and its whole body: leg 1, or leg 2 of a plain request, kept until it is complete,
        so that it can be retried."""
        try:
            reply = await leg.worker.upstream.send(leg.request, head_seconds=seconds, sent=leg.sent)
            answer = reply.body_if_one_piece()
            if answer is None:
                answer = await self._read(reply, seconds)
        except UpstreamError as error:
            raise leg_error(error) from error
        return reply, self._checked(leg, reply, answer)

    async def _whole(
        self, leg: LegRequest, reply: Reply, seconds: float, begun: bytes = b""
    ) -> bytes:
        try:
            body = begun + await self._read(reply, seconds)
        except UpstreamError as error:
            raise leg_error(error) from error
        return self._checked(leg, reply, body)

    async def _read(self, reply: Reply, seconds: float) -> bytes:
        return await reply.whole(self._limits.max_reply_bytes, seconds, self._timeouts.idle)

    def _checked(self, leg: LegRequest, reply: Reply, body: bytes) -> bytes:
        """The body, unpacked, of a 200; raises for anything else."""
        status, encoding = reply.status, reply.headers.get(b"content-encoding")
        if encoding is not None and is_undone(encoding):
            body = self._inflated(body)
        if status == 200:
            return body
        if status >= 500 and status != 501:  # that one is about what was asked
            message = f"answered {status}: {_message(body)}"
            raise LegError(message, 502, unreachable=False, answered=True)
        if status in (408, 429):  # the worker's trouble, not the client's
            message = f"answered {status}: {_message(body)}"
            raise LegError(message, 503, unreachable=False, answered=True)
        if status < 400:  # nobody's answer: an engine that has moved, or something before it
            place = reply.headers.get(b"location", b"")[:MAX_SHOWN].decode(errors="replace")
            message = f"answered {status}" + (f", pointing to {place}" if place else "")
            raise LegError(message, 502, unreachable=False, answered=True)
        raise ClientFault(_worker_answer(reply, body), leg.worker.row.id)

    def _inflated(self, body: bytes) -> bytes:
        try:
            return inflate(body, self._limits.max_reply_bytes)
        except (ValueError, TooLargeError) as error:
            message = f"answered compressed, and that is {error}"
            raise LegError(message, 502, unreachable=False) from None


def request_of(
    worker: WorkerState,
    path: bytes,
    head: bytes,
    body: bytes,
    content_type: bytes = b"application/json",
) -> bytes:
    """As it goes over the wire."""
    upstream = worker.upstream
    return (
        b"POST %b%b HTTP/1.1\r\nhost: %b\r\ncontent-type: %b\r\n"
        b"content-length: %d\r\n%b\r\n%b"
        % (upstream.base_path, path, upstream.host_header, content_type, len(body), head, body)
    )


def is_no_stream(reply: Reply, begin: bytes = b"", *, is_split: bool = False) -> bool:
    """Whether it answers as if no stream had been asked for: with JSON that has a length, or that
    shows by how its body begins. Some engines call a stream of events JSON too."""
    if _is_event_stream(reply):
        return False
    if _is_json(reply) and b"content-length" in reply.headers:
        return True
    kind = reply.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if not is_split and kind != b"application/json":  # it may be objects, line by line
        return False
    return begin.lstrip()[:1] in (b"{", b"[")


def _no_stream(reply: Reply) -> LegError:
    kind = reply.headers.get(b"content-type", b"none")[:MAX_SHOWN].decode(errors="replace")
    message = f"answered 200 with no stream of events (content-type: {kind})"
    return LegError(message, 502, unreachable=False)


def _is_as_it_is(reply: Reply, first: bytes, data: bytes, *, is_split: bool) -> bool:
    """Whether what has begun without a whole event is to be taken so: JSON, or what only its
    client understands. `data`: without comments. Raises `LegError` for what will be no stream."""
    if data.strip() and not may_become_event(data):
        if not is_split or is_no_stream(reply, first, is_split=True):
            return True
        if not _is_event_stream(reply):
            raise _no_stream(reply)
        if ends_event(data):
            return True
    if reply.complete and (is_split or not data):
        raise LegError("ended the stream before its first event", 502, unreachable=False)
    return reply.complete


def _is_event_stream(reply: Reply) -> bool:
    return reply.headers.get(b"content-type", b"").startswith(b"text/event-stream")


def _is_json(reply: Reply) -> bool:
    return reply.headers.get(b"content-type", b"").startswith(b"application/json")


def check_answer(reply: Reply, body: bytes, *, is_object: bool = False) -> None:
    """A 200 with nothing, with an error, or with half of an answer, is none. `is_object`: nothing
    else is one on this route. Whether that has choices is seen when it is read."""
    headers = reply.headers
    is_framed = b"content-length" in headers or b"transfer-encoding" in headers
    if is_framed and len(body) > 16 and body[0] == 0x7B and body.find(b'"error"', 0, 64) < 0:
        return  # whole, an object, and no error's: the usual case, without reading it
    encoding = headers.get(b"content-encoding")
    if encoding is not None and not is_undone(encoding):
        return  # nobody here can read it
    if body.startswith(FIELDS):
        _check_events(body)  # asked for in a way that its engine understands and we do not
        return
    try:
        content = _read_json(body) if body.strip() else None
    except ValueError as error:
        message = f"answered 200 with what is no JSON: {error}"
        raise LegError(message, 502, unreachable=False) from None
    if content is None or content == {}:
        raise LegError("answered 200 with nothing", 502, unreachable=False)
    if isinstance(content, dict) and _is_error(content):
        message = f"answered 200 with an error: {_message(body)}"
        raise LegError(message, 502, unreachable=False, answered=True)
    if is_object and not isinstance(content, dict):
        raise LegError("answered 200 with what is no JSON object", 502, unreachable=False)


def _plain(reply: Reply, begin: bytes) -> bytes:
    """How a body begins, unpacked as far as it can be."""
    encoding = reply.headers.get(b"content-encoding")
    return peek(begin) if encoding is not None and is_undone(encoding) else begin


def _check_events(events: bytes) -> None:
    """A stream in one piece that begins with its failure or its end, or has no data, is no answer."""
    first = past_comments(events)
    if not first.startswith(b"data:"):
        raise LegError("ended the stream without content", 502, unreachable=False)
    _check_first(first)


def _check_first(first: bytes) -> None:
    """What a stream begins with, past its comments."""
    if first.startswith(DONE_MARKS):
        raise LegError("ended the stream without content", 502, unreachable=False)
    failed = _ERROR_EVENT.match(first) if first.find(b'"error"', 0, 32) >= 0 else None
    if failed is not None:
        cause = first[failed.end() : 300].decode(errors="replace").strip()
        raise LegError(f"failed: {cause}", 502, unreachable=False, answered=True)


def _is_error(content: Mapping[str, Any]) -> bool:
    """An error object, and no answer that has a field for its errors."""
    if content.get("object") == "error":
        return True
    return bool(content.get("error")) and "id" not in content and "choices" not in content


def _read_json(body: bytes) -> Any:
    """Raises ValueError. Some engines write NaN and lone surrogates, which Python's own reader
    takes."""
    try:
        try:
            return _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _worker_answer(reply: Reply, body: bytes) -> WorkerAnswer:
    kind = reply.headers.get(b"content-type", b"application/json")
    return WorkerAnswer(reply.status, kind, passed_headers(reply), body)


def passed_headers(reply: Reply) -> bytes:
    """Header lines of a worker's reply: all but what is of one connection, or ours to say."""
    if not reply.headers.keys() - _NOT_TO_CLIENT:
        return b""
    lines = reply.headers.get(b"connection", b"").split(b"\r\nconnection: ")
    of_this_hop = frozenset(tokens(b",".join(lines)))
    return b"".join(
        b"%b: %b\r\n" % item
        for item in reply.headers.items()
        if item[0] not in _NOT_TO_CLIENT
        and item[0] not in of_this_hop
        and not (item[0] == b"content-encoding" and is_undone(item[1]))
    )


def leg_head(request_id: str, leg: Literal["p", "d"], client: dict[bytes, bytes]) -> bytes:
    """Header lines of a leg. The id is ours: two clients may use the same one (A43)."""
    lines = f"x-request-id: {request_id}{'-p' if leg == 'p' else ''}\r\n".encode()
    if IS_TOLD.isdisjoint(client):
        return lines
    told = (b"%b: %b\r\n" % (name, client[name]) for name in TOLD if name in client)
    return lines + b"".join(told)


def leg_error(error: UpstreamError) -> LegError:
    status = _STATUS.get(error.kind, 502)
    unreachable = error.kind in ("connect", "reset", "hung")
    refused = error.kind == "connect"
    return LegError(
        str(error), status, unreachable=unreachable, was_sent=error.was_sent, refused=refused
    )


class _Ours(msgspec.Struct):
    num_blocks: int | None = None


class _Params(msgspec.Struct):
    perilune: _Ours | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Any = None
    prompt_tokens_details: Any = None


class _Prefilled(msgspec.Struct):
    """The parts of leg 1's reply that matter; the rest is not even built."""

    error: Any = None
    kv_transfer_params: _Params | None = None
    usage: _Usage | None = None


class _Foreign(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_decode_foreign = msgspec.json.Decoder(_Foreign).decode
_decode_prefilled = msgspec.json.Decoder(_Prefilled).decode


def prefill_reply(body: bytes, *, foreign: bool) -> PrefillReply:
    """Of leg 1. Raises `LegError`."""
    try:
        reply = _decode_prefilled(body)
        params = _decode_foreign(body).kv_transfer_params if foreign else None
    except msgspec.DecodeError as error:
        raise LegError(f"answered what we cannot read: {error}", 502, unreachable=False) from None
    if reply.error is not None:
        message = f"answered 200 with an error: {_message(body)}"
        raise LegError(message, 502, unreachable=False, answered=True)
    ours = reply.kv_transfer_params and reply.kv_transfer_params.perilune
    usage = reply.usage
    details = usage.prompt_tokens_details if usage else None
    if not isinstance(details, dict):
        details = None
    return PrefillReply(
        ours.num_blocks if ours else None,
        count(usage.prompt_tokens) if usage else None,
        count(details.get("cached_tokens")) if details else None,
        params,
        details,
    )


def _message(body: bytes) -> str:
    """The engine's own words, short."""
    try:
        return str(_decode(body)["error"]["message"])[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def unreachable_answer(leg: str, worker_id: str, asked: Asked, error: LegError) -> AnswerError:
    """What the client reads when a leg failed everywhere."""
    message = f"the {leg} leg of request {asked.request_id} failed on worker {worker_id}: {error}"
    if error.status != 503:
        return AnswerError(error.status, message, f"{leg}_leg_failed")
    message += f"; no other {leg} worker of model {asked.model} takes requests now"
    return AnswerError(503, message, f"{leg}_leg_failed", retry_after=1)
