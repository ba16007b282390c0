"""The outermost layer of the web server: request ids, the token, the body limit, last-resort errors.

Plain ASGI, so that a stream passes through untouched and no write route can forget the token.
"""

from __future__ import annotations

import re
import secrets
import traceback
from http.cookies import CookieError, SimpleCookie
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.errors import (
    PROBLEM_TYPE,
    ApiError,
    TooLargeError,
    UnauthorizedError,
    problem_json,
)
from controlplane.metrics.requests import RequestCounts
from controlplane.schema_base import Problem
from controlplane.settings import Settings

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
TOKEN_COOKIE = "perilune_token"  # noqa: S105 - the cookie's name, not a token
OPEN_PATHS = frozenset({"/health"})

log = structlog.get_logger("controlplane")


class Edge:
    """Wraps the whole application. `open_paths` may be read without the token on any host."""

    def __init__(
        self, app: ASGIApp, settings: Settings, counts: RequestCounts, open_paths: set[str]
    ) -> None:
        self.app = app
        self.settings = settings
        self.counts = counts
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        exchange = _Exchange(scope, receive, send, self.settings.max_body_bytes, request_id)
        try:
            self._admit(scope, headers)
            exchange.check_length(headers)
            await self.app(scope, exchange.receive, exchange.send)
        except ApiError as error:
            await exchange.fail(error.problem, error.headers)
        except Exception:
            # as text: a pretty traceback would show local variables, the token among them
            log.error(  # noqa: TRY400
                "request failed",
                path=scope["path"],
                request_id=request_id,
                trace=traceback.format_exc(),
            )
            detail = f"An error inside the control plane; its log names request {request_id}."
            await exchange.fail(Problem(title="internal error", status=500, detail=detail), {})
        finally:
            self.counts.add(scope, exchange.status)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Writes need the token; reads too where others than this machine's users can reach us."""
        reading = scope["method"] in READ_METHODS
        if reading and (self.settings.reads_are_open or self._is_open(scope["path"])):
            return
        given = bearer(headers)
        if given is None and reading:
            given = cookie_token(headers)
        if given is not None and secrets.compare_digest(given, self.settings.token.encode()):
            return
        what = "no bearer token" if given is None else "a bearer token that is not this cluster's"
        raise UnauthorizedError(
            f"The request carries {what}.",
            field="Authorization",
            way_out=f"Send 'Authorization: Bearer TOKEN'; the token is in {self.settings.token_file} "
            "on the control plane's host (or set $PERILUNE_TOKEN).",
            headers={"WWW-Authenticate": 'Bearer realm="perilune"'},
        )

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or path in self.open_paths


def bearer(headers: Headers) -> bytes | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        return None
    return token.strip().encode("utf-8", "surrogateescape")


def cookie_token(headers: Headers) -> bytes | None:
    """A browser's event stream cannot set headers: for reading, the token may come as a cookie."""
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(TOKEN_COOKIE)
    except CookieError:
        return None
    return morsel.value.encode("utf-8", "surrogateescape") if morsel else None


class _Exchange:
    """One request's two directions, watched."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limit: int, request_id: str
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._limit = limit
        self._received = 0
        self._overflow: TooLargeError | None = None
        self._request_id = request_id.encode()
        self.status = 0

    def check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_large(int(length))

    def _too_large(self, size: int) -> TooLargeError:
        return TooLargeError(
            f"The body has {size} bytes, the limit is {self._limit}.",
            field="body",
            value=size,
            way_out="Send less at once.",
            headers={"Connection": "close"},
        )

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            if self._received > self._limit:
                self._overflow = self._too_large(self._received)
                raise self._overflow
        return message

    async def send(self, message: Message) -> None:
        if self._overflow is not None:  # the framework made another error of it
            await self.fail(self._overflow.problem, self._overflow.headers)
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers: list[tuple[bytes, bytes]] = list(message.get("headers", []))
            message = {**message, "headers": [*headers, (b"x-request-id", self._request_id)]}
        await self._send(message)

    async def fail(self, problem: Problem, headers: dict[str, str]) -> None:
        if self.status:  # the answer has begun: there is no second one
            return
        self.status = problem.status
        body = problem_json(problem)
        sent: list[tuple[bytes, bytes]] = [
            (b"content-type", PROBLEM_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            *((name.lower().encode(), value.encode()) for name, value in headers.items()),
        ]
        start: dict[str, Any] = {
            "type": "http.response.start",
            "status": problem.status,
            "headers": sent,
        }
        sent.append((b"x-request-id", self._request_id))
        head = self._scope["method"] == "HEAD"
        await self._send(start)
        await self._send({"type": "http.response.body", "body": b"" if head else body})
