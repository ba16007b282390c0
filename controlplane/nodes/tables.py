"""Table of nodes: what must outlive a restart of the control plane."""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base, UtcDateTime


class NodeRow(Base):
    """One row a node. `facts`: endpoint, namespaces, sizes, as the last heartbeat said."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    incarnation: Mapped[int] = mapped_column(BigInteger)
    restarts: Mapped[int]
    joined_at: Mapped[datetime] = mapped_column(UtcDateTime)
    last_heartbeat_at: Mapped[datetime] = mapped_column(UtcDateTime)
    facts: Mapped[dict[str, object]] = mapped_column(JSON)
