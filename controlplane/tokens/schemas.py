"""Client keys of /v1 and their tenants. (The operator's bearer token is a file, not a row.)"""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from controlplane.schema_base import Page, Schema

MaxPriority = Annotated[str, Field(max_length=32, pattern=r"^([a-z0-9][a-z0-9_-]*)?$")]


class KeyCreate(Schema):
    """Body of POST /api/v1/keys. `max_priority`: the highest class of the admission policy that
    the key's requests may claim by `x-perilune-priority`; empty: the default class."""

    tenant: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    note: Annotated[str, Field(max_length=200)] = ""
    max_priority: MaxPriority = ""


class Key(Schema):
    """A key without its secret."""

    id: int
    prefix: str
    tenant: str
    note: str = ""
    max_priority: str = ""
    created_at: datetime


class KeyCreated(Key):
    """The only reply that carries the secret."""

    secret: str


class KeyList(Page):
    """GET /api/v1/keys, oldest first."""

    items: list[Key]
