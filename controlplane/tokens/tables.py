"""Table of the client keys of /v1: a key's SHA-256, never the key."""

from datetime import datetime

from sqlalchemy import String, Text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base, UtcDateTime


class KeyRow(Base):
    """A client key and its tenant."""

    __tablename__ = "client_keys"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    prefix: Mapped[str] = mapped_column(String(16))
    key_sha256: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(64))
    note: Mapped[str] = mapped_column(Text)
    max_priority: Mapped[str] = mapped_column(String(32), server_default="")
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
