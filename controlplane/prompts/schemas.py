"""Prompts: what gateways send with a record, and what a reader gets."""

from typing import Annotated

from pydantic import Field

from controlplane.schema_base import Schema

MAX_KEYS_CHARS = 1_400_000
"""Base64 of 65,536 keys of 16 bytes."""
MAX_TOKENS_CHARS = 8_000_000
Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$")]


class PromptRecord(Schema):
    """Part of a decision on its way from the gateway; kept apart from the record.

    `keys`: base64 of the full blocks' keys, 16 bytes each, in the prompt's order. `tokens`: base64
    of zlib over the ids as little-endian int32; null where the policy keeps none.
    """

    namespace: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    block_tokens: Annotated[int, Field(ge=1, le=65_536)]
    num_tokens: Annotated[int, Field(ge=0, le=100_000_000)]
    keys: Annotated[Base64, Field(max_length=MAX_KEYS_CHARS)] = ""
    tokens: Annotated[Base64 | None, Field(max_length=MAX_TOKENS_CHARS)] = None


class Prompt(Schema):
    """GET /api/v1/decisions/{id}/prompt. `keys` in hex, one a full block; `token_ids` null where
    the records policy (field `prompts`) does not keep them."""

    request_id: str
    namespace: str
    block_tokens: int
    num_tokens: int
    keys: list[str]
    token_ids: list[int] | None = None
