"""What every REST schema shares: unknown fields are refused, values are frozen."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_INTEGER = 2**53
"""What SQLite, Postgres and JavaScript all hold."""


def _http_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("no http address")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("has a user, a query or a fragment, which are not sent")
    return text


Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")]
ModelId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255}$")]
Url = Annotated[str, Field(pattern=r"^[!-~]{1,2000}$"), AfterValidator(_http_url)]
Reason = Annotated[str, Field(max_length=500)]


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
