"""The pages' way to REST: the same application, called without a socket."""

from __future__ import annotations

import httpx2
from fastapi import FastAPI, Request

from controlplane.client import AsyncClient

_FORWARDED = ("authorization", "cookie", "x-forwarded-for")


class _AsTheReader(httpx2.ASGITransport):
    """Reads with what the browser sent: a page shows nothing that its reader may not read."""

    def __init__(self, app: FastAPI, request: Request) -> None:
        super().__init__(app=app, raise_app_exceptions=False)
        self._headers = {
            name: request.headers[name] for name in _FORWARDED if name in request.headers
        }

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        for name, value in self._headers.items():
            request.headers[name] = value
        return await super().handle_async_request(request)


def client_for(app: FastAPI, request: Request) -> AsyncClient:
    """A client for one page; the caller closes it. Streams do not pass through it."""
    return AsyncClient("http://127.0.0.1", "", transport=_AsTheReader(app, request))
