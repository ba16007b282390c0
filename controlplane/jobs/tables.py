"""Table of jobs: operators' actions that take longer than a request."""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base, UtcDateTime


class JobRow(Base):
    """`spec` is what to do, `result` what came of it, `undo` the job that would take it back."""

    __tablename__ = "jobs"
    __table_args__ = (Index(None, "state"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    kind: Mapped[str] = mapped_column(String(32))
    target: Mapped[str] = mapped_column(String(300))
    spec: Mapped[dict[str, object]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int]
    automatic: Mapped[bool]
    done: Mapped[int] = mapped_column(BigInteger)
    total: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    author: Mapped[str] = mapped_column(String(64))
    reason: Mapped[str] = mapped_column(Text)
    request_id: Mapped[str] = mapped_column(String(128))
    error: Mapped[str] = mapped_column(Text)
    result: Mapped[dict[str, object]] = mapped_column(JSON)
    undo: Mapped[dict[str, object]] = mapped_column(JSON)
