"""Tables of decision records and of what the workers reported of each leg."""

from datetime import datetime

from sqlalchemy import Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base, UtcDateTime


class DecisionRow(Base):
    """One request. `record` is the whole `Decision` as JSON; the other columns are for search."""

    __tablename__ = "decisions"
    __table_args__ = (
        Index(None, "at", "request_id"),
        Index(None, "status", "at"),
        Index(None, "transfer_id"),
    )

    request_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    transfer_id: Mapped[str] = mapped_column(String(128))
    tenant: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(256))
    status: Mapped[str] = mapped_column(String(32))
    prefill_worker: Mapped[str] = mapped_column(String(128))
    decode_worker: Mapped[str] = mapped_column(String(128))
    kv_counted: Mapped[bool]
    record: Mapped[str] = mapped_column(Text)


class LegRow(Base):
    """A leg report that came by heartbeat; joined with its decision whenever either is read."""

    __tablename__ = "leg_reports"
    __table_args__ = (Index(None, "at"),)

    transfer_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    worker_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    kv_role: Mapped[str] = mapped_column(String(16), primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    record: Mapped[str] = mapped_column(Text)
