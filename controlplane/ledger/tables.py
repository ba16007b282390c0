"""Table of would-be rejections: those rejected, those shed while they waited, and probes."""

from datetime import datetime

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base, UtcDateTime


class LedgerRow(Base):
    """One request that admission said no to, or would have."""

    __tablename__ = "ledger"
    __table_args__ = (Index(None, "at", "request_id"),)

    request_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    kind: Mapped[str] = mapped_column(String(16))
    gate: Mapped[str] = mapped_column(String(16))
    model: Mapped[str] = mapped_column(String(256))
    tenant: Mapped[str] = mapped_column(String(64))
    priority: Mapped[str] = mapped_column(String(32))
    predicted_seconds: Mapped[float]
    limit_seconds: Mapped[float]
    measured_seconds: Mapped[float | None]
    met: Mapped[bool | None]
    retry_after_seconds: Mapped[float | None]
    policy: Mapped[str | None] = mapped_column(String(320))
