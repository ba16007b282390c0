"""Decision records: stored whole, joined with leg reports, counted once, bounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import Clock
from controlplane.cursors import make_cursor, parse_cursor
from controlplane.db.session import Transaction
from controlplane.decisions import repository
from controlplane.decisions.join import KvOutcome, join, kv_outcome, supersedes
from controlplane.decisions.repository import Filters
from controlplane.decisions.schemas import Decision, DecisionList
from controlplane.decisions.tables import DecisionRow
from controlplane.errors import InvalidError, NotFoundError
from controlplane.events.bus import EventBus
from controlplane.policies.schemas import RecordsSpec
from controlplane.prompts.service import row_of
from controlplane.prompts.service import save as save_prompts
from workers.core.messages import LegReport

MAX_ID_CHARS = 128
Legs = dict[str, list[LegReport]]


@dataclass(slots=True)
class DecisionLog:
    """`on_outcome` hears of each finished request's KV once, after it is stored."""

    bus: EventBus
    clock: Clock
    on_outcome: Callable[[KvOutcome], None]
    stored_total: int = 0

    async def store(self, tx: Transaction, given: list[Decision]) -> int:
        """Take a gateway's records. Repeats do no harm; returns how many were new or newer."""
        for index, decision in enumerate(given):
            _check(decision, f"decisions.{index}")
        latest = _latest(given)
        old = {row.request_id: row for row in await repository.by_ids(tx.session, latest)}
        news = [d for i, d in latest.items() if i not in old or supersedes(d, old[i].status)]
        legs = await self._legs(tx.session, [d.transfer_id for d in news if d.transfer_id])
        joined = [join(d, legs.get(d.transfer_id, [])) for d in news]
        counted = {i for i, row in old.items() if row.kv_counted}
        outcomes = _outcomes(joined, counted)
        prompts = [row_of(d.request_id, d.at, d.prompt) for d in joined if d.prompt is not None]
        joined = [d.model_copy(update={"prompt": None}) if d.prompt else d for d in joined]
        rows = [_row(d, d.request_id in counted or d.request_id in outcomes) for d in joined]
        if rows:
            await repository.save(tx.session, rows)
        if prompts:
            await save_prompts(tx.session, prompts)
        self._tell(tx, joined, outcomes)
        return len(rows)

    async def store_legs(self, tx: Transaction, reports: list[LegReport]) -> None:
        """Take an agent's leg reports; those whose decision is already here complete it."""
        for index, report in enumerate(reports):
            check_id(report.transfer_id, f"leg_reports.{index}.transfer_id")
            check_id(report.worker_id, f"leg_reports.{index}.worker_id")
        latest = {(r.transfer_id, r.worker_id, r.kv_role): r for r in reports}
        await repository.save_legs(
            tx.session, [_leg_row(r, self.clock.now()) for r in latest.values()]
        )
        transfers = {report.transfer_id for report in latest.values() if report.transfer_id}
        rows = await repository.by_transfers(tx.session, transfers)
        if not rows:
            return
        legs = await self._legs(tx.session, [row.transfer_id for row in rows])
        joined = [_joined(row, legs) for row in rows]
        outcomes = _outcomes(joined, {row.request_id for row in rows if row.kv_counted})
        if outcomes:
            await repository.mark_counted(tx.session, list(outcomes))
        self._tell(tx, joined, outcomes)

    def _tell(
        self, tx: Transaction, decisions: list[Decision], outcomes: dict[str, KvOutcome]
    ) -> None:
        def tell() -> None:
            self.stored_total += len(decisions)
            for decision in decisions:
                self.bus.publish("decision", decision)
            for outcome in outcomes.values():
                self.on_outcome(outcome)

        tx.after_commit(tell)

    async def _legs(self, session: AsyncSession, transfer_ids: list[str]) -> Legs:
        found: Legs = {}
        if transfer_ids:
            for row in await repository.legs_of(session, transfer_ids):
                report = msgspec.json.decode(row.record, type=LegReport)
                found.setdefault(row.transfer_id, []).append(report)
        return found

    async def list(
        self, session: AsyncSession, filters: Filters, limit: int, cursor: str | None
    ) -> DecisionList:
        """Newest first. `total` counts all that match, on the first page only."""
        after = parse_cursor(cursor) if cursor else None
        rows = await repository.page(session, filters, limit + 1, after)
        total = None if cursor else await repository.count(session, filters)
        shown = rows[:limit]
        legs = await self._legs(session, [row.transfer_id for row in shown if row.transfer_id])
        more = len(rows) > limit
        return DecisionList(
            items=[_joined(row, legs) for row in shown],
            next_cursor=make_cursor(shown[-1].at, shown[-1].request_id) if more else None,
            total=total,
        )

    async def find(self, session: AsyncSession, request_id: str) -> Decision:
        rows = await repository.by_ids(session, [request_id])
        if not rows:
            raise NotFoundError(
                f"No request {request_id!r}.",
                field="request_id",
                value=request_id,
                way_out="Records are kept as the records policy says (perilune policy show "
                "records/default); GET /api/v1/decisions lists them.",
            )
        return _joined(rows[0], await self._legs(session, [rows[0].transfer_id]))

    async def prune(self, session: AsyncSession, spec: RecordsSpec) -> None:
        """Drop what is older or more than the records policy keeps."""
        oldest = self.clock.now() - timedelta(days=spec.days)
        await repository.prune(session, oldest, spec.max_records)


def _check(decision: Decision, field: str) -> None:
    check_id(decision.request_id, f"{field}.request_id")
    check_id(decision.transfer_id, f"{field}.transfer_id")
    check_time(decision.at, f"{field}.at")


def check_id(value: str, field: str) -> None:
    if len(value) > MAX_ID_CHARS or "\x00" in value:
        raise InvalidError(
            f"{field}: no id.",
            field=field,
            value=value,
            way_out=f"At most {MAX_ID_CHARS} characters.",
        )


def check_time(value: datetime, field: str) -> None:
    if not 1970 <= value.year <= 9998:
        raise InvalidError(
            f"{field}: not in reach.",
            field=field,
            value=value.isoformat(),
            way_out="Allowed: years 1970 to 9998.",
        )


def _search_text(value: str, limit: int) -> str:
    """Postgres holds no NUL, and the column has a bound; the record keeps the whole."""
    return value.replace("\x00", "")[:limit]


def _latest(given: list[Decision]) -> dict[str, Decision]:
    latest: dict[str, Decision] = {}
    for decision in given:
        old = latest.get(decision.request_id)
        if old is None or supersedes(decision, old.status):
            latest[decision.request_id] = decision
    return latest


def _outcomes(decisions: list[Decision], counted: set[str]) -> dict[str, KvOutcome]:
    found = {d.request_id: kv_outcome(d) for d in decisions if d.request_id not in counted}
    return {request_id: outcome for request_id, outcome in found.items() if outcome is not None}


def _joined(row: DecisionRow, legs: Legs) -> Decision:
    return join(Decision.model_validate_json(row.record), legs.get(row.transfer_id, []))


def _row(decision: Decision, counted: bool) -> dict[str, object]:
    return {
        "request_id": decision.request_id,
        "at": decision.at if decision.at.tzinfo else decision.at.replace(tzinfo=UTC),
        "transfer_id": decision.transfer_id,
        "tenant": _search_text(decision.tenant, 64),
        "model": _search_text(decision.model, 256),
        "status": decision.status,
        "prefill_worker": _search_text(decision.prefill_worker, MAX_ID_CHARS),
        "decode_worker": _search_text(decision.decode_worker, MAX_ID_CHARS),
        "kv_counted": counted,
        "record": decision.model_dump_json(),
    }


def _leg_row(report: LegReport, at: datetime) -> dict[str, object]:
    return {
        "transfer_id": report.transfer_id,
        "worker_id": report.worker_id,
        "kv_role": report.kv_role,
        "at": at,
        "record": msgspec.json.encode(report).decode(),
    }
