"""The audit trail's table: rows are added, never changed."""

from datetime import datetime

from sqlalchemy import Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base, UtcDateTime


class AuditRecord(Base):
    """Who did what to what, why, and how it was before."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "at"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    actor: Mapped[str] = mapped_column(String(64))
    verb: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(300))
    before: Mapped[str] = mapped_column(Text)
    after: Mapped[str] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Text)
    result: Mapped[str] = mapped_column(String(64))
    request_id: Mapped[str] = mapped_column(String(128))
