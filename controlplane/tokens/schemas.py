"""Client keys of /v1 and their tenants. (The operator's bearer token is a file, not a row.)"""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from controlplane.schema_base import Page, Schema


class KeyCreate(Schema):
    """Body of POST /api/v1/keys."""

    tenant: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    note: Annotated[str, Field(max_length=200)] = ""


class Key(Schema):
    """A key without its secret."""

    id: int
    prefix: str
    tenant: str
    note: str = ""
    created_at: datetime


class KeyCreated(Key):
    """The only reply that carries the secret."""

    secret: str


class KeyList(Page):
    """GET /api/v1/keys, oldest first."""

    items: list[Key]
