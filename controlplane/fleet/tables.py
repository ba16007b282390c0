"""Tables of workers and of the commands they are yet to obey."""

from datetime import datetime

from sqlalchemy import JSON, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base, UtcDateTime


class WorkerRow(Base):
    """One row an engine process. `facts`: the rest of its last `WorkerStatus`."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    node_id: Mapped[str] = mapped_column(String(128))
    external: Mapped[bool]
    drained: Mapped[bool]
    seen_at: Mapped[datetime] = mapped_column(UtcDateTime)
    facts: Mapped[dict[str, object]] = mapped_column(JSON)


class CommandRow(Base):
    """A command not yet acknowledged by the node's agent; acknowledged ones are deleted."""

    __tablename__ = "worker_commands"
    __table_args__ = (Index(None, "node_id"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    worker_id: Mapped[str] = mapped_column(String(128))
    node_id: Mapped[str] = mapped_column(String(128))
    action: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
