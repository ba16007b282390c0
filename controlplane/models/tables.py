"""Table of models."""

from sqlalchemy import BigInteger, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base


class ModelRow(Base):
    """A model by the name that clients send."""

    __tablename__ = "models"

    id: Mapped[str] = mapped_column(String(256), primary_key=True)
    path: Mapped[str] = mapped_column(Text)
    max_model_len: Mapped[int | None] = mapped_column(BigInteger)
    kv_bytes_per_token: Mapped[int | None] = mapped_column(BigInteger)
