"""The ledger of would-be rejections: filled from decision records, judged by their probes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock
from controlplane.core.ledger import Probe, would_have_met
from controlplane.core.ledger import false_rejects as interval
from controlplane.cursors import make_cursor, parse_cursor
from controlplane.decisions.schemas import Decision
from controlplane.decisions.words import deciding_policy
from controlplane.ledger import repository
from controlplane.ledger.repository import LedgerFilters
from controlplane.ledger.schemas import (
    CauseSummary,
    ClassSummary,
    FalseRejects,
    LedgerEntry,
    LedgerList,
    LedgerSummary,
)
from controlplane.ledger.tables import LedgerRow

KEEP_ROWS = 50_000
KEEP_DAYS = 7
MAX_CAUSES = 20
MAX_PROBES = 500
"""Newest probes that a rejected request is compared with."""


@dataclass(slots=True)
class Ledger:
    """One row a request, bounded by number and age."""

    clock: Clock

    async def record(self, session: AsyncSession, decisions: Iterable[Decision]) -> None:
        """Of these, those that admission turned away or let in as probes. Repeats do no harm."""
        rows = [_row(d) for d in decisions if d.admission is not None and d.status != "running"]
        if rows:
            await repository.save(session, rows)

    async def page(
        self, session: AsyncSession, filters: LedgerFilters, limit: int, cursor: str | None
    ) -> LedgerList:
        """Newest first."""
        after = parse_cursor(cursor) if cursor else None
        rows = await repository.page(session, filters, limit + 1, after)
        shown, more = rows[:limit], len(rows) > limit
        likes = await self._likes(session, shown)
        return LedgerList(
            items=[_entry(row, likes) for row in shown],
            next_cursor=make_cursor(shown[-1].at, shown[-1].request_id) if more else None,
        )

    async def summary(
        self, session: AsyncSession, filters: LedgerFilters, window_seconds: float
    ) -> LedgerSummary:
        by_class: dict[str, dict[str, int]] = {}
        for priority, kind, met, count in await repository.counts(session, filters):
            counted = by_class.setdefault(priority, {})
            counted[kind] = counted.get(kind, 0) + count
            if met is not None:
                counted["judged"] = counted.get("judged", 0) + count
                counted["met"] = counted.get("met", 0) + (count if met else 0)
        total: dict[str, int] = {}
        for counted in by_class.values():
            for name, count in counted.items():
                total[name] = total.get(name, 0) + count
        return LedgerSummary(
            window_seconds=window_seconds,
            rejected=total.get("rejected", 0),
            shed=total.get("shed", 0),
            probes=total.get("probe", 0),
            false_rejects=_false_rejects(total),
            classes=[_class(name, by_class[name]) for name in sorted(by_class)],
            causes=await self._causes(session, filters),
        )

    async def _causes(self, session: AsyncSession, filters: LedgerFilters) -> list[CauseSummary]:
        return [
            CauseSummary(gate=gate, policy=policy or "", turned_away=count, last_at=last)
            for gate, policy, count, last in await repository.causes(session, filters, MAX_CAUSES)
        ]

    async def prune(self, session: AsyncSession) -> None:
        oldest = self.clock.now() - timedelta(days=KEEP_DAYS)
        await repository.prune(session, oldest, KEEP_ROWS)

    async def _likes(
        self, session: AsyncSession, rows: list[LedgerRow]
    ) -> dict[tuple[str, str], list[Probe]]:
        """Probes by model and gate, for the rejected among these rows."""
        wanted = {(row.model, row.gate) for row in rows if row.kind == "rejected"}
        now = self.clock.now()
        return {
            (model, gate): [
                Probe(_excess(probe), bool(probe.met))
                for probe in await repository.judged(session, model, gate, now, MAX_PROBES)
            ]
            for model, gate in wanted
        }


def _row(decision: Decision) -> dict[str, object]:
    verdict = decision.admission
    assert verdict is not None
    kind = "probe" if verdict.probe else "rejected"
    if verdict.gate in ("queue_full", "deadline"):
        kind = "shed"
    return {
        "request_id": decision.request_id,
        "at": decision.at if decision.at.tzinfo else decision.at.replace(tzinfo=UTC),
        "kind": kind,
        "gate": verdict.gate,
        "model": decision.model.replace("\x00", "")[:256],
        "tenant": decision.tenant.replace("\x00", "")[:64],
        "priority": decision.priority.replace("\x00", "")[:32],
        "predicted_seconds": verdict.predicted_seconds,
        "limit_seconds": verdict.limit_seconds,
        "measured_seconds": verdict.measured_seconds,
        "met": verdict.met,
        "retry_after_seconds": decision.retry_after_seconds,
        "policy": deciding_policy(decision).replace("\x00", "")[:320] or None,
    }


def _entry(row: LedgerRow, likes: dict[tuple[str, str], list[Probe]]) -> LedgerEntry:
    estimate = None
    if row.kind == "rejected":
        found = would_have_met(_excess(row), likes[row.model, row.gate])
        estimate = FalseRejects.model_validate(found, from_attributes=True)
    return LedgerEntry(
        request_id=row.request_id,
        at=row.at,
        kind=row.kind,  # type: ignore[arg-type]  # written by `_row` alone
        gate=row.gate,
        model=row.model,
        tenant=row.tenant,
        priority=row.priority,
        predicted_seconds=row.predicted_seconds,
        limit_seconds=row.limit_seconds,
        measured_seconds=row.measured_seconds,
        met=row.met,
        retry_after_seconds=row.retry_after_seconds,
        would_have_met=estimate,
        policy=row.policy or "",
    )


def _excess(row: LedgerRow) -> float:
    return row.predicted_seconds / row.limit_seconds if row.limit_seconds > 0 else 0.0


def _false_rejects(counted: dict[str, int]) -> FalseRejects:
    found = interval(counted.get("judged", 0), counted.get("met", 0))
    return FalseRejects.model_validate(found, from_attributes=True)


def _class(priority: str, counted: dict[str, int]) -> ClassSummary:
    return ClassSummary(
        priority=priority,
        rejected=counted.get("rejected", 0),
        shed=counted.get("shed", 0),
        probes=counted.get("probe", 0),
        false_rejects=_false_rejects(counted),
    )
