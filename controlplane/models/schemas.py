"""Models that the cluster serves."""

from typing import Annotated

from pydantic import Field

from controlplane.schema_base import MAX_INTEGER, Page, Schema


class Model(Schema):
    """`path` holds tokenizer.json and tokenizer_config.json for routing."""

    id: str  # the name clients send
    path: str
    max_model_len: int | None = None
    kv_bytes_per_token: int | None = None
    workers: list[str] = []


class ModelRegistration(Schema):
    """Body of PUT /api/v1/models/{id}."""

    path: Annotated[str, Field(max_length=4096)]
    max_model_len: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    kv_bytes_per_token: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = None


class ModelList(Page):
    """GET /api/v1/models, by id."""

    items: list[Model]
