"""The control plane's routes of requests in flight and of the ledger, from recorded objects."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from controlplane.gateways.running_schemas import RunningList
from controlplane.ledger.schemas import FalseRejects, LedgerList, LedgerSummary
from controlplane.schema_base import Schema


def _reply(body: Schema) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def add_requests(app: FastAPI, recorded: Any) -> None:
    """`recorded` has `running`, `ledger` and `summary`; each may be missing."""

    @app.get("/api/v1/requests")
    async def running(limit: int = 200) -> Response:
        found = recorded.running or RunningList(items=[])
        return _reply(found.model_copy(update={"items": found.items[:limit]}))

    @app.get("/api/v1/ledger")
    async def ledger(limit: int = 100, cursor: str = "") -> Response:
        return _reply(recorded.ledger or LedgerList(items=[]))

    @app.get("/api/v1/ledger/summary")
    async def summary(window: float = 3600) -> Response:
        nothing = LedgerSummary(window_seconds=window, false_rejects=FalseRejects())
        return _reply(recorded.summary or nothing)
