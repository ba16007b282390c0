"""Errors of the REST API and their problem+json form. Services raise them, one place renders them.

ApiError                     carries its status
├── BadRequestError      400 not JSON at all
├── UnauthorizedError    401 no token, or not ours
├── NotFoundError        404 no such thing
├── ConflictError        409 the thing's state does not allow it
├── StaleError           412 If-Match names another revision
├── TooLargeError        413 the body is over the limit
├── InvalidError         422 a field's value cannot work
├── IfMatchMissingError  428 a change without saying of what
└── UnavailableError     503 the database does not answer in time
"""

from __future__ import annotations

import json

from controlplane.schema_base import Problem
from workers.core.errors import PeriluneError

PROBLEM_TYPE = "application/problem+json"
MAX_SHOWN_CHARS = 200


class ApiError(PeriluneError):
    """Answer with this status and these words."""

    status = 500
    title = "error"

    def __init__(
        self,
        detail: str,
        *,
        field: str | None = None,
        value: object | None = None,
        way_out: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.headers = headers or {}
        self.problem = Problem(
            title=self.title,
            status=self.status,
            detail=detail,
            field=field,
            value=shown(value),
            way_out=way_out,
        )


class BadRequestError(ApiError):
    status, title = 400, "bad request"


class UnauthorizedError(ApiError):
    status, title = 401, "unauthorized"


class NotFoundError(ApiError):
    status, title = 404, "not found"


class ConflictError(ApiError):
    status, title = 409, "conflict"


class StaleError(ApiError):
    status, title = 412, "precondition failed"


class TooLargeError(ApiError):
    status, title = 413, "body too large"


class InvalidError(ApiError):
    status, title = 422, "invalid value"


class IfMatchMissingError(ApiError):
    status, title = 428, "precondition required"


class UnavailableError(ApiError):
    status, title = 503, "unavailable"


def shown(value: object) -> object:
    """The value as it goes into a problem: JSON, and not the whole of a large one."""
    if value is None or isinstance(value, bool | int | float):
        return value if not isinstance(value, float) or abs(value) < float("inf") else str(value)
    if isinstance(value, str):
        return value if len(value) <= MAX_SHOWN_CHARS else value[:MAX_SHOWN_CHARS] + "..."
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError):
        text = str(value)
    return value if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def problem_json(problem: Problem) -> bytes:
    """The body of an error answer; members that say nothing are left out."""
    return json.dumps(problem.model_dump(exclude_none=True), default=str).encode()
