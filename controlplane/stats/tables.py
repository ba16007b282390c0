"""Table of statistics: one row a source and bucket, all metrics in one msgpack document."""

from sqlalchemy import BigInteger, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base


class StatRow(Base):
    """`at` is the bucket's start in seconds since the epoch; `resolution` 1 or 10 seconds."""

    __tablename__ = "stat_points"
    __table_args__ = (
        Index(None, "resolution", "at"),
        {"sqlite_with_rowid": False},
    )

    resolution: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    source: Mapped[str] = mapped_column(String(300), primary_key=True)
    at: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    data: Mapped[bytes] = mapped_column(LargeBinary)
