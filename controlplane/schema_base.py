"""What every REST schema shares: unknown fields are refused, values are frozen."""

from pydantic import BaseModel, ConfigDict


class Schema(BaseModel):
    """Base of all REST bodies. Times are RFC 3339 UTC, durations `_seconds`, sizes `_bytes`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Page(Schema):
    """Paging of a list: pass `next_cursor` as `cursor` to read on; null at the end."""

    next_cursor: str | None = None
    total: int | None = None


class Problem(BaseModel):
    """application/problem+json (RFC 9457); `field`, `value` and `way_out` are ours."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    field: str | None = None
    value: object | None = None
    way_out: str | None = None
