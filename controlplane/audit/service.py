"""The audit trail: a row in the same transaction as the write it tells of."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import repository
from controlplane.audit.schemas import AuditRow
from controlplane.audit.tables import AuditRecord
from controlplane.clock import Clock
from controlplane.db.session import Transaction
from controlplane.events.bus import EventBus

RECENT_ROWS = 50
KEEP_ROWS = 200_000
MAX_TEXT_CHARS = 2000


@dataclass(slots=True)
class AuditTrail:
    """`recent` (newest first) is what Overview shows without a query each second."""

    bus: EventBus
    clock: Clock
    recent: deque[AuditRow] = field(default_factory=lambda: deque(maxlen=RECENT_ROWS))

    async def load(self, session: AsyncSession) -> None:
        rows = await repository.newest(session, limit=RECENT_ROWS)
        self.recent.extend(to_schema(row) for row in rows)

    async def record(
        self,
        tx: Transaction,
        *,
        actor: str,
        request_id: str,
        verb: str,
        target: str,
        before: object = None,
        after: object = None,
        reason: str = "",
    ) -> None:
        """Add a row; it is published once the write is committed."""
        record = AuditRecord(
            at=self.clock.now(),
            actor=actor,
            verb=verb,
            target=target,
            before=_short(before),
            after=_short(after),
            reason=reason,
            result="ok",
            request_id=request_id,
        )
        row = to_schema(await repository.add(tx.session, record))
        tx.after_commit(lambda: self._tell(row))

    def _tell(self, row: AuditRow) -> None:
        self.recent.appendleft(row)
        self.bus.publish("audit", row)


def to_schema(record: AuditRecord) -> AuditRow:
    return AuditRow(
        id=record.id,
        at=record.at,
        actor=record.actor,
        verb=record.verb,
        target=record.target,
        before=record.before,
        after=record.after,
        reason=record.reason,
        result=record.result,
        request_id=record.request_id,
    )


def _short(value: object) -> str:
    if value is None:
        return ""
    return json.dumps(value, sort_keys=True, default=str)[:MAX_TEXT_CHARS]
