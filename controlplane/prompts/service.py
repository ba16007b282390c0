"""Keeps prompts beside their records, within a time and a size of their own."""

from __future__ import annotations

import base64
import binascii
import sys
import zlib
from array import array
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.base import upsert
from controlplane.errors import InvalidError, NotFoundError
from controlplane.policies.schemas import RecordsSpec
from controlplane.prompts.schemas import Prompt, PromptRecord
from controlplane.prompts.tables import PromptRow
from workers.core.hashing import BLOCK_HASH_BYTES as HASH_BYTES

MAX_TOKENS_BYTES: Final = 16 * 1024 * 1024
"""Of one prompt, unpacked: 4 million ids."""


def row_of(request_id: str, at: datetime, prompt: PromptRecord) -> dict[str, object]:
    """Raises `InvalidError` for what a gateway of ours would not send."""
    keys = _bytes("prompt.keys", prompt.keys)
    if len(keys) % HASH_BYTES:
        raise InvalidError(
            "prompt.keys: no keys.",
            field="prompt.keys",
            value=f"{len(keys)} bytes",
            way_out=f"Send {HASH_BYTES} bytes a key.",
        )
    tokens = None if prompt.tokens is None else _bytes("prompt.tokens", prompt.tokens)
    return {
        "request_id": request_id,
        "at": at,
        "namespace": prompt.namespace,
        "block_tokens": prompt.block_tokens,
        "num_tokens": prompt.num_tokens,
        "keys": keys,
        "tokens": tokens,
        "size_bytes": len(keys) + len(tokens or b""),
    }


async def save(session: AsyncSession, rows: list[dict[str, object]]) -> None:
    await upsert(session, PromptRow, rows, ["request_id"])


async def find(session: AsyncSession, request_id: str) -> Prompt:
    """Raises `NotFoundError`, which says what may be the cause."""
    row = await session.get(PromptRow, request_id)
    if row is None:
        raise NotFoundError(
            f"No prompt of request {request_id!r} is kept.",
            field="request_id",
            value=request_id,
            way_out=(
                "Kept are requests with one prompt whose token ids the gateway knew, for the time"
                " and size that the records policy says: perilune policy show records/default."
            ),
        )
    return Prompt(
        request_id=row.request_id,
        namespace=row.namespace,
        block_tokens=row.block_tokens,
        num_tokens=row.num_tokens,
        keys=[
            row.keys[start : start + HASH_BYTES].hex()
            for start in range(0, len(row.keys), HASH_BYTES)
        ],
        token_ids=None if row.tokens is None else _token_ids(row.tokens),
    )


async def prune(session: AsyncSession, now: datetime, spec: RecordsSpec) -> None:
    """Drop what is older than the policy's hours, and the oldest beyond its size."""
    oldest = now - timedelta(hours=spec.prompt_hours)
    await session.execute(delete(PromptRow).where(PromptRow.at < oldest))
    newest_first = (PromptRow.at.desc(), PromptRow.request_id.desc())
    total = func.sum(PromptRow.size_bytes).over(order_by=newest_first)
    sums = select(PromptRow.at.label("at"), total.label("total")).subquery()
    limit = spec.prompt_mib * 1024 * 1024
    over = select(sums.c.at).where(sums.c.total > limit).order_by(sums.c.at.desc()).limit(1)
    edge: datetime | None = await session.scalar(over)
    if edge is not None:
        await session.execute(delete(PromptRow).where(PromptRow.at <= edge))


def _bytes(field: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidError(
            f"{field}: no base64.", field=field, value=text[:40], way_out="Encode it again."
        ) from None


def _token_ids(packed: bytes) -> list[int] | None:
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, MAX_TOKENS_BYTES)
    except zlib.error:
        return None  # damaged: the keys still stand
    if len(raw) % 4:
        return None
    ids = array("i", raw)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
