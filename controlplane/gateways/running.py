"""Requests in flight at all gateways, and the end of one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from controlplane.clock import Clock
from controlplane.errors import ConflictError, NotFoundError, UnavailableError
from controlplane.gateways.asking import GatewayClient, GatewayError, Listing, NotRunningError
from controlplane.gateways.running_schemas import (
    GatewayAnswer,
    RequestCancelled,
    RunningList,
    RunningRequest,
)
from controlplane.gateways.service import GatewayRegistry, LiveGateway

SHARED_SECONDS = 0.5
"""Those who ask within so long of one another share an answer."""
SILENT_PAUSE_SECONDS = 5.0
"""One that did not answer is left alone for so long: it must not make each answer late."""
MAX_KEPT = 200
"""Rows kept of a gateway's last answer, for when it falls silent."""


@dataclass(slots=True)
class _Known:
    """Of one gateway: its last answer and when that came (monotonic); since when it is silent."""

    listing: Listing | None = None
    at: float = 0.0
    silent_since: datetime | None = None
    problem: str = ""
    ask_again_at: float = 0.0
    was_asked: bool = True  # lost ones are not


@dataclass(slots=True)
class RunningRequests:
    """Nothing is asked while nobody looks. What a silent gateway said last is kept and marked."""

    clock: Clock
    gateways: GatewayRegistry
    client: GatewayClient
    _known: dict[str, _Known] = field(default_factory=dict)
    _asked_at: float = float("-inf")
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def list(self, limit: int) -> RunningList:
        """All gateways as of now; never raises for one that does not answer."""
        async with self._lock:
            is_old = self.clock.monotonic() - self._asked_at >= SHARED_SECONDS
            if is_old or self._has_come_back():
                await self._ask_all()
        return self._told(limit)

    async def cancel(self, request_id: str, gateway_id: str, actor: str) -> RequestCancelled:
        """Tell the request's gateway. Raises NotFoundError (no such gateway), ConflictError (it has
        just ended), UnavailableError (no answer)."""
        gateway = self.gateways.find(gateway_id)
        try:
            row = await self.client.cancel(gateway.url.rstrip("/"), request_id, actor)
        except NotRunningError as error:
            raise ConflictError(
                f"Request {request_id} does not run at gateway {gateway.id} any more, or is ending"
                " already. Nothing was cancelled.",
                field="request_id",
                value=request_id,
                way_out="Its record says how it ended: perilune describe request ID.",
            ) from error
        except GatewayError as error:
            raise UnavailableError(
                f"Gateway {gateway.id} at {gateway.url}: {error}. Whether the request was cancelled"
                " is unknown.",
                field="gateway",
                value=gateway.id,
                way_out="Look again whether it runs, then once more.",
            ) from error
        self._asked_at = float("-inf")
        return RequestCancelled(cancelled=row.model_copy(update={"gateway": gateway.id}))

    async def find(self, request_id: str, gateway_id: str) -> str:
        """Where it runs; without a `gateway_id` all are asked. Raises NotFoundError."""
        if gateway_id:
            return self.gateways.find(gateway_id).id
        await self.list(1)
        for name, known in self._known.items():
            rows = known.listing.requests if known.listing is not None else []
            if any(row.request_id == request_id for row in rows):
                return name
        silent = ", ".join(n for n, k in self._known.items() if k.silent_since is not None)
        raise NotFoundError(
            f"No gateway runs a request {request_id!r}"
            + (f"; without an answer: {silent}." if silent else "."),
            field="request_id",
            value=request_id,
            way_out="perilune get running lists what runs.",
        )

    def _has_come_back(self) -> bool:
        """A gateway was not asked for it was lost, and reports again."""
        unasked = {name for name, known in self._known.items() if not known.was_asked}
        return any(g.id in unasked and g.state != "lost" for g in self.gateways.all())

    async def _ask_all(self) -> None:
        known = {gateway.id: gateway for gateway in self.gateways.all()}
        for gone in self._known.keys() - known.keys():
            del self._known[gone]
        await asyncio.gather(*(self._ask(gateway) for gateway in known.values()))
        self._asked_at = self.clock.monotonic()

    async def _ask(self, gateway: LiveGateway) -> None:
        known = self._known.setdefault(gateway.id, _Known())
        was_asked, known.was_asked = known.was_asked, gateway.state != "lost"
        if not known.was_asked:
            self._silent(known, "it has stopped reporting and is not asked")
            return
        if (
            was_asked
            and known.silent_since is not None
            and self.clock.monotonic() < known.ask_again_at
        ):
            return
        try:
            listing = await self.client.listing(gateway.id, gateway.url.rstrip("/"))
        except GatewayError as error:
            self._silent(known, str(error))
            return
        known.listing, known.at = listing, self.clock.monotonic()
        known.silent_since, known.problem = None, ""

    def _silent(self, known: _Known, problem: str) -> None:
        known.problem = problem
        known.ask_again_at = self.clock.monotonic() + SILENT_PAUSE_SECONDS
        if known.silent_since is None:
            known.silent_since = self.clock.now()
            if known.listing is not None:
                del known.listing.requests[MAX_KEPT:]

    def _told(self, limit: int) -> RunningList:
        now = self.clock.monotonic()
        rows: list[RunningRequest] = []
        answers: list[GatewayAnswer] = []
        for gateway in self.gateways.all():
            known = self._known.get(gateway.id)
            if known is None:
                continue  # it came after the others were asked
            answers.append(_answer(gateway, known, now))
            if known.listing is not None:
                rows.extend(
                    row.model_copy(update={"gateway": gateway.id}) for row in known.listing.requests
                )
        ordered = sorted(rows, key=urgency)
        return RunningList(
            items=ordered[:limit],
            total=sum(answer.running for answer in answers),
            stuck=sum(answer.stuck for answer in answers),
            by_state=_by_state(rows),
            gateways=answers,
        )

    async def close(self) -> None:
        await self.client.close()


def urgency(row: RunningRequest) -> tuple[bool, float, float, str]:
    """Stuck ones first, then by the share of its bound that each has waited, then the oldest."""
    share = 0.0
    if row.bound_seconds and row.wait_seconds is not None:
        share = row.wait_seconds / row.bound_seconds
    return (not row.stuck, -share, -row.age_seconds, row.request_id)


def _answer(gateway: LiveGateway, known: _Known, now: float) -> GatewayAnswer:
    listing = known.listing
    requests = listing.requests if listing is not None else []
    running = listing.running if listing is not None else 0
    return GatewayAnswer(
        gateway=gateway.id,
        state=gateway.state,
        answers=known.silent_since is None,
        running=len(requests) if running is None else running,
        stuck=sum(row.stuck for row in requests),
        age_seconds=None if listing is None else round(max(0.0, now - known.at), 3),
        silent_since=known.silent_since,
        last_report_at=gateway.last_report_at,
        problem=known.problem,
    )


def _by_state(rows: Iterable[RunningRequest]) -> dict[str, int]:
    return dict(sorted(Counter(row.state for row in rows).items()))
