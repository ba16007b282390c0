"""Table of prompts."""

from datetime import datetime

from sqlalchemy import Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.base import Base, UtcDateTime


class PromptRow(Base):
    """One request of one prompt. `keys`: 16 bytes each; `tokens`: zlib over little-endian int32."""

    __tablename__ = "prompts"
    __table_args__ = (Index(None, "at", "request_id"),)

    request_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    namespace: Mapped[str] = mapped_column(String(64))
    block_tokens: Mapped[int]
    num_tokens: Mapped[int]
    keys: Mapped[bytes] = mapped_column(LargeBinary)
    tokens: Mapped[bytes | None] = mapped_column(LargeBinary)
    size_bytes: Mapped[int]
