"""Requests in flight, as the gateways say when they are asked."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from controlplane.schema_base import Schema


class RunningRequest(Schema):
    """One request in flight. `wait_seconds` of `bound_seconds` (null: this wait has no bound of the
    policy's) are over for what it waits for; at the bound the policy will `end` it with 504, or only
    `report` it. Ages count from when the gateway answered."""

    request_id: str
    client_request_id: str = ""
    gateway: str = ""
    tenant: str = ""
    model: str = ""
    state: str = ""  # waiting, prefilling, handing_over, decoding
    age_seconds: float
    waits_for: str = ""
    worker: str = ""  # that it waits for
    wait_seconds: float | None = None
    bound_seconds: float | None = None
    at_bound: Literal["", "end", "report"] = ""
    stuck: bool = False
    prefill_worker: str = ""
    decode_worker: str = ""
    retries: int = 0
    prompt_tokens: int | None = None


class GatewayAnswer(Schema):
    """How a gateway answered. Where it did not: since when (`silent_since`), why, and how old what is
    shown of it is (`age_seconds`; null: it has never answered)."""

    gateway: str
    state: str  # as its reports say: ready, stale, lost
    answers: bool
    running: int = 0
    stuck: int = 0
    age_seconds: float | None = None
    silent_since: datetime | None = None
    last_report_at: datetime
    problem: str = ""


class RunningList(Schema):
    """GET /api/v1/requests?limit=200: stuck ones first, then by how much of its bound each has
    waited, then the oldest. `total` and `stuck` count those that are not listed too."""

    items: list[RunningRequest]
    total: int = 0
    stuck: int = 0
    by_state: dict[str, int] = {}  # of those that gateways list, 1000 each
    gateways: list[GatewayAnswer] = []


class RequestCancel(Schema):
    """Body of POST /api/v1/requests/{id}/cancel. `gateway`: that it runs at; empty: all are asked."""

    gateway: Annotated[str, Field(max_length=128)] = ""
    reason: Annotated[str, Field(max_length=500)] = ""


class RequestCancelled(Schema):
    """The request was told to end; its row as it was just before."""

    cancelled: RunningRequest
