"""Models that the cluster serves."""

from controlplane.schema_base import Page, Schema


class Model(Schema):
    """`path` holds tokenizer.json and tokenizer_config.json for routing."""

    id: str  # the name clients send
    path: str
    max_model_len: int | None = None
    kv_bytes_per_token: int | None = None
    workers: list[str] = []


class ModelRegistration(Schema):
    """Body of PUT /api/v1/models/{id}."""

    path: str
    max_model_len: int | None = None
    kv_bytes_per_token: int | None = None


class ModelList(Page):
    """GET /api/v1/models, by id."""

    items: list[Model]
