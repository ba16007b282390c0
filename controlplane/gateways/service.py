"""Gateways as they report themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock
from controlplane.db.session import Transaction
from controlplane.errors import ConflictError, InvalidError, NotFoundError, UnavailableError
from controlplane.gateways import repository
from controlplane.gateways.schemas import (
    HISTOGRAM_BOUNDS_SECONDS,
    Gateway,
    GatewayReport,
    GatewayStats,
)
from controlplane.nodes.state import Grace, node_state

MAX_GATEWAYS = 256
MAX_LOST_GATEWAYS = 50
SAVE_SECONDS = 5.0


@dataclass(slots=True)
class LiveGateway:
    id: str
    url: str
    pid: int
    view_revision: int
    last_report_at: datetime
    seen: float
    stats: GatewayStats | None = None
    state: str = "ready"
    saved: float = float("-inf")


class GatewayRegistry:
    """By id. A gateway that stays silent becomes stale, then lost, as a node does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._gateways: dict[str, LiveGateway] = {}
        self._removed: set[str] = set()
        self._grace = Grace(clock.monotonic())

    async def load(self, session: AsyncSession) -> None:
        now, mono = self._clock.now(), self._clock.monotonic()
        for row in await repository.everything(session):
            age = max(0.0, (now - row.last_report_at).total_seconds())
            self._gateways[row.id] = LiveGateway(
                id=row.id,
                url=row.url,
                pid=row.pid,
                view_revision=0,  # of another life of ours
                last_report_at=row.last_report_at,
                seen=mono - age,
                state=node_state(age),
                saved=mono,
            )

    def report(self, gateway_id: str, body: GatewayReport) -> LiveGateway:
        check_histograms(body.stats)
        gateway = self._gateways.get(gateway_id)
        if gateway is None and len(self._gateways) >= MAX_GATEWAYS:
            raise UnavailableError(
                f"{MAX_GATEWAYS} gateways are known, which is the limit.",
                field="gateway_id",
                value=gateway_id,
                way_out="Give a restarted gateway its old id (--id).",
            )
        now, mono = self._clock.now(), self._clock.monotonic()
        if gateway is not None and gateway.stats is not None and _is_heard(gateway, mono):
            _check_life(gateway_id, gateway.stats, body.stats)
        if gateway is None:
            gateway = LiveGateway(gateway_id, body.url, body.pid, 0, now, mono)
            self._gateways[gateway_id] = gateway
            self._removed.discard(gateway_id)
        gateway.url, gateway.pid, gateway.stats = body.url, body.pid, body.stats
        gateway.view_revision = body.view_revision
        gateway.last_report_at, gateway.seen, gateway.state = now, mono, "ready"
        return gateway

    def sweep(self) -> tuple[list[str], list[str]]:
        """Recompute states; (newly lost, dropped)."""
        mono = self._clock.monotonic()
        grace = self._grace.look(mono)
        newly: list[str] = []
        for gateway in self._gateways.values():
            state: str = node_state(max(0.0, mono - gateway.seen))
            if state == "lost" and grace and gateway.state != "lost":
                state = "stale"
            if state == "lost" and gateway.state != "lost":
                newly.append(gateway.id)
            gateway.state = state
        lost = sorted((g.seen, g.id) for g in self._gateways.values() if g.state == "lost")
        dropped = [name for _, name in lost[: max(0, len(lost) - MAX_LOST_GATEWAYS)]]
        for gateway_id in dropped:
            del self._gateways[gateway_id]
        self._removed.update(dropped)
        return newly, dropped

    def live_ids(self) -> list[str]:
        """Gateways that should acknowledge a policy: heard of within 3 s."""
        mono = self._clock.monotonic()
        return sorted(g.id for g in self._gateways.values() if _is_heard(g, mono))

    def live(self) -> list[LiveGateway]:
        return [g for g in self._gateways.values() if g.state != "lost" and g.stats is not None]

    def all(self) -> list[LiveGateway]:
        """By id, lost ones too."""
        return [self._gateways[name] for name in sorted(self._gateways)]

    def find(self, gateway_id: str) -> LiveGateway:
        gateway = self._gateways.get(gateway_id)
        if gateway is None:
            known = ", ".join(sorted(self._gateways)[:10]) or "none"
            raise NotFoundError(
                f"No gateway {gateway_id!r}.",
                field="gateway_id",
                value=gateway_id,
                way_out=f"Known gateways: {known}.",
            )
        return gateway

    def list(self) -> list[Gateway]:
        return [self.to_schema(gateway) for gateway in self.all()]

    def to_schema(self, gateway: LiveGateway) -> Gateway:
        return Gateway(
            id=gateway.id,
            url=gateway.url,
            pid=gateway.pid,
            state=gateway.state,
            view_revision=gateway.view_revision,
            last_report_at=gateway.last_report_at,
            age_seconds=round(max(0.0, self._clock.monotonic() - gateway.seen), 3),
            stats=gateway.stats,
        )

    async def save(self, tx: Transaction) -> None:
        """Write the last reports, every few seconds."""
        mono = self._clock.monotonic()
        removed, self._removed = self._removed, set()
        due = [
            g
            for g in self._gateways.values()
            if mono - g.saved >= SAVE_SECONDS and g.seen > g.saved
        ]
        rows = [_row(gateway) for gateway in due]
        for gateway in due:
            gateway.saved = mono

        def restore() -> None:
            self._removed |= removed
            for gateway in due:
                gateway.saved = float("-inf")

        tx.after_failure(restore)
        if removed:
            await repository.remove(tx.session, removed)
        if rows:
            await repository.save(tx.session, rows)


def _row(gateway: LiveGateway) -> Mapping[str, Any]:
    return {
        "id": gateway.id,
        "url": gateway.url,
        "pid": gateway.pid,
        "view_revision": gateway.view_revision,
        "last_report_at": gateway.last_report_at,
        "stats": gateway.stats.model_dump(mode="json") if gateway.stats else {},
    }


def _is_heard(gateway: LiveGateway, mono: float) -> bool:
    """Lately. One that has fallen silent keeps its id from nobody, an older gateway neither."""
    return node_state(mono - gateway.seen) == "ready"


def _check_life(gateway_id: str, known: GatewayStats, given: GatewayStats) -> None:
    if given.started_at < known.started_at:
        raise ConflictError(
            f"Gateway {gateway_id} is known since {known.started_at.isoformat()}; this report is "
            f"of one started at {given.started_at.isoformat()}.",
            field="stats.started_at",
            value=given.started_at.isoformat(),
            way_out="Two gateways use one id: stop the older, or give it an id of its own.",
        )


def check_histograms(stats: GatewayStats) -> None:
    """Every histogram must have our buckets, or percentiles would be of something else."""
    wanted = len(HISTOGRAM_BOUNDS_SECONDS) + 1
    for name in ("ttft", "tbt", "queue"):
        counts = getattr(stats, name).counts
        if len(counts) != wanted or any(count < 0 for count in counts):
            raise InvalidError(
                f"stats.{name}.counts: must be {wanted} counts of 0 or more.",
                field=f"stats.{name}.counts",
                value=counts,
                way_out="Gateway and control plane must be of one version.",
            )
