"""Tables of policies: revisions never change, one pointer says which one is active."""

from datetime import datetime

from sqlalchemy import JSON, ForeignKeyConstraint, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base, UtcDateTime


class RevisionRow(Base):
    """An immutable revision."""

    __tablename__ = "policy_revisions"

    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    scope: Mapped[str] = mapped_column(String(128), primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    spec: Mapped[dict[str, object]] = mapped_column(JSON)
    author: Mapped[str] = mapped_column(String(64))
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class ActiveRow(Base):
    """The active revision of a kind and scope."""

    __tablename__ = "policies"
    __table_args__ = (
        ForeignKeyConstraint(
            ["kind", "scope", "revision"],
            ["policy_revisions.kind", "policy_revisions.scope", "policy_revisions.revision"],
        ),
    )

    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    scope: Mapped[str] = mapped_column(String(128), primary_key=True)
    revision: Mapped[int]
