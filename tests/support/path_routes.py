"""The control plane's routes of transfers between nodes and of the doctor, from recorded objects."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from controlplane.doctor.schemas import DoctorReport
from controlplane.schema_base import Schema
from controlplane.transfers.schemas import NodeTransferList


def _reply(body: Schema) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def add_paths(app: FastAPI, recorded: Any) -> None:
    """`recorded` has `doctor` and `transfers`; either may be missing."""

    @app.get("/api/v1/doctor")
    async def doctor() -> Response:
        return _reply(recorded.doctor or DoctorReport())

    @app.get("/api/v1/transfers/nodes")
    async def nodes(
        source: str = "", destination: str = "", limit: int = 500, *, links: bool = True
    ) -> Response:
        found = recorded.transfers or NodeTransferList(rows=[], total=0, links=[], alarms=[])
        rows = [
            r for r in found.rows if source in ("", r.source) and destination in ("", r.destination)
        ]
        shown = {"rows": rows[:limit], "total": len(rows), "links": found.links if links else []}
        return _reply(found.model_copy(update=shown))
