"""Asks the gateways themselves: each call bounded in time and size, each answer checked for whose
it is."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from controlplane.gateways.running_schemas import RunningRequest
from workers.core.errors import PeriluneError

ASK_SECONDS = 2.0
MAX_AT_ONCE = 32
MAX_REPLY_BYTES = 4 * 1024 * 1024
MAX_LISTED = 1000


class GatewayError(PeriluneError):
    """It did not answer as it should; the text says how."""


class NotRunningError(PeriluneError):
    """The gateway does not have the request."""


def _known_only(row: object) -> object:
    if not isinstance(row, dict):
        return row
    return {name: value for name, value in row.items() if name in RunningRequest.model_fields}


class Listing(BaseModel):
    """What `GET /debug/requests` of a gateway says. Older ones do not name themselves, newer ones may
    say more."""

    gateway: str = ""
    running: int | None = None
    requests: Annotated[
        list[Annotated[RunningRequest, BeforeValidator(_known_only)]],
        Field(default=[], max_length=MAX_LISTED),
    ]


@dataclass(slots=True)
class GatewayClient:
    """One HTTP client for all gateways; `close` ends it."""

    token: str
    _http: httpx2.AsyncClient | None = None
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_AT_ONCE))

    async def listing(self, gateway_id: str, url: str) -> Listing:
        """Raises GatewayError."""
        body = await self._call("GET", f"{url}/debug/requests")
        try:
            found = Listing.model_validate_json(body)
        except ValidationError as error:
            raise GatewayError(f"its answer cannot be read: {error.errors()[0]['msg']}") from error
        if found.gateway and found.gateway != gateway_id:
            raise GatewayError(f"its address {url} leads to gateway {found.gateway}")
        return found

    async def cancel(self, url: str, request_id: str, actor: str) -> RunningRequest:
        """Raises GatewayError, NotRunningError."""
        path = f"{url}/debug/requests/{quote(request_id, safe='')}/cancel"
        body = await self._call("POST", path, {"X-Perilune-Actor": actor})
        try:
            return RunningRequest.model_validate(_known_only(json.loads(body)))
        except ValueError as error:
            raise GatewayError("it was told; its answer cannot be read") from error

    async def _call(self, method: str, url: str, headers: dict[str, str] | None = None) -> bytes:
        sent = {"Authorization": f"Bearer {self.token}", **(headers or {})}
        try:
            async with (
                self._turns,
                asyncio.timeout(ASK_SECONDS),
                self._client().stream(method, url, headers=sent) as reply,
            ):
                body = await _read(reply)
        except TimeoutError as error:
            raise GatewayError(f"no answer within {ASK_SECONDS:g} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise GatewayError(f"no answer ({str(error) or type(error).__name__})") from error
        if reply.status_code == 404 and method == "POST":
            raise NotRunningError("it does not run there")
        if reply.status_code != 200:
            raise GatewayError(f"it answers {reply.status_code} to {method} {httpx2.URL(url).path}")
        return body

    def _client(self) -> httpx2.AsyncClient:
        if self._http is None:
            self._http = httpx2.AsyncClient(trust_env=False, timeout=ASK_SECONDS)
        return self._http

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()


async def _read(reply: httpx2.Response) -> bytes:
    body = bytearray()
    async for piece in reply.aiter_bytes():
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            raise GatewayError(f"its answer is over {MAX_REPLY_BYTES} bytes")
    return bytes(body)
