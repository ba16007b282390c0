"""What both clients share: where the control plane is, the token, errors, reading answers.

ClientError                 the control plane said no: status, field, value, way_out
└── UnreachableError        it did not answer (status 0)
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import TypeAdapter, ValidationError

from controlplane.calls import Call
from controlplane.schema_base import Problem
from workers.core.errors import ConfigError, PeriluneError
from workers.data_dir import default_data_dir

DEFAULT_URL = "http://127.0.0.1:7700"
TIMEOUT_SECONDS = 10.0
STREAM_SILENCE_SECONDS = 15.0
"""The server sends a comment every 5 s: a longer silence is a dead connection."""
BACKOFF_SECONDS = (0.5, 10.0)
NOT_OF_A_NAME = re.compile(r"[^A-Za-z0-9._@+-]")
"""A login name may hold more than the audit trail's names (an umlaut, a domain's backslash)."""

T = TypeVar("T")


class ClientError(PeriluneError):
    """A problem+json answer; the text is one line for an operator."""

    def __init__(self, problem: Problem) -> None:
        text = problem.detail or problem.title
        super().__init__(f"{text} {problem.way_out}" if problem.way_out else text)
        self.problem = problem
        self.status = problem.status
        self.field = problem.field
        self.value = problem.value
        self.way_out = problem.way_out


class UnreachableError(ClientError):
    """No answer: refused, reset or timed out."""

    def __init__(self, url: str, cause: Exception) -> None:
        reason = str(cause) or type(cause).__name__
        if isinstance(cause, httpx2.TimeoutException):
            reason = f"{reason}. It may hang or be overloaded (perilune logs control-plane)"
        problem = Problem(
            title="control plane unreachable",
            status=0,
            detail=f"no answer from the control plane at {url}: {reason}.",
            field="url",
            value=url,
            way_out="Is it running (perilune status)? Another address: --url or $PERILUNE_URL.",
        )
        super().__init__(problem)


def default_url() -> str:
    """$PERILUNE_URL, else that of the cluster in the data folder, else loopback's usual port."""
    return os.environ.get("PERILUNE_URL") or _url_of_local_cluster() or DEFAULT_URL


def check_url(url: str) -> str:
    """Without a slash at its end. Raises `ConfigError` for what no control plane can have."""
    try:
        parsed = httpx2.URL(url)
        usable = parsed.scheme in ("http", "https") and parsed.host and urlsplit(url).port != 0
    except (httpx2.InvalidURL, ValueError):
        usable = False
    if not usable:
        way_out = f"Write it as {DEFAULT_URL} (--url or $PERILUNE_URL)."
        raise ConfigError("url", url, "is no http address", way_out)
    return url.rstrip("/")


def _url_of_local_cluster() -> str | None:
    """What `perilune up` wrote down, where it runs on other ports than usual."""
    try:
        state = json.loads((default_data_dir() / "run" / "supervisor.json").read_bytes())
        return str(state["control_plane_url"]) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_token(data: Path | None = None) -> str | None:
    """$PERILUNE_TOKEN, else the token file of the data folder, else None."""
    token = os.environ.get("PERILUNE_TOKEN")
    if token:
        return token.strip()
    try:
        return ((data or default_data_dir()) / "token").read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(frozen=True, slots=True)
class StreamState:
    """How the event stream is doing, for a console's header."""

    connected: bool
    error: str = ""
    retry_in_seconds: float | None = None


def make_headers(token: str | None, actor: str | None) -> dict[str, str]:
    headers = {"Accept": "application/json"}
    if token:
        if not token.isascii() or not token.isprintable():
            way_out = "Copy it again from the control plane's host ($PERILUNE_TOKEN or the file)."
            raise ConfigError("token", "...", "holds characters that no token has", way_out)
        headers["Authorization"] = f"Bearer {token}"
    if actor:
        headers["X-Perilune-Actor"] = NOT_OF_A_NAME.sub("_", actor)[:64]
    return headers


def make_request(call: Call[T]) -> dict[str, Any]:
    request: dict[str, Any] = {"method": call.method, "url": call.path, "headers": call.headers}
    if call.params:
        request["params"] = call.params
    if call.body is not None:
        request["content"] = call.body.model_dump_json()
        request["headers"] = {**call.headers, "Content-Type": "application/json"}
    if call.timeout_seconds is not None:
        request["timeout"] = call.timeout_seconds
    return request


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def decode(call: Call[T], response: httpx2.Response) -> T:
    if response.status_code >= 400:
        raise ClientError(problem_of(response))
    if call.reply is None or response.status_code in {204, 304}:
        return None  # type: ignore[return-value]  # T is None or Optional for these calls
    adapter = _ADAPTERS.get(call.reply)
    if adapter is None:
        adapter = _ADAPTERS[call.reply] = TypeAdapter(call.reply)
    try:
        value: T = adapter.validate_json(response.content)
    except ValidationError as error:
        detail = f"{call.method} {call.path} answered what this version cannot read: {error}"
        way_out = "Console and control plane must be of one version."
        raise ClientError(
            Problem(title="unreadable answer", status=502, detail=detail, way_out=way_out)
        ) from error
    return value


def problem_of(response: httpx2.Response) -> Problem:
    """The problem+json of an error answer; made up from the status where there is none."""
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:
        detail = f"HTTP {response.status_code} from {response.request.url}"
        return Problem(title="HTTP error", status=response.status_code, detail=detail)
