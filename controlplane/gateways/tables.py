"""Table of gateways."""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base, UtcDateTime


class GatewayRow(Base):
    """A gateway and its last report."""

    __tablename__ = "gateways"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    url: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(BigInteger)
    view_revision: Mapped[int] = mapped_column(BigInteger)
    last_report_at: Mapped[datetime] = mapped_column(UtcDateTime)
    stats: Mapped[dict[str, object]] = mapped_column(JSON)
