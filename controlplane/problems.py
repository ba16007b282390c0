"""Framework and validation errors in problem+json: field, value, allowed range, way out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from controlplane.errors import (
    PROBLEM_TYPE,
    ApiError,
    BadRequestError,
    InvalidError,
    UnavailableError,
    problem_json,
    shown,
)
from controlplane.schema_base import Problem

WAY_OUT_OF_STATUS = {
    404: "The paths of the API are listed at /openapi.json.",
    405: "The methods of each path are listed at /openapi.json.",
}
MAX_NAMED_CHARS = 80
PLACES = frozenset({"body", "query", "path", "header"})
NOT_JSON = frozenset({"json_invalid", "bytes_invalid_encoding"})


def install(app: FastAPI) -> None:
    """Render every error of the framework, the services and the database as problem+json."""

    @app.exception_handler(HTTPException)
    async def _http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = Problem(
            title=error.detail.lower(),
            status=error.status_code,
            detail=f"{error.detail}.",
            way_out=WAY_OUT_OF_STATUS.get(error.status_code),
        )
        return _response(problem, error.headers)

    @app.exception_handler(RequestValidationError)
    async def _validation(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _response(invalid(error.errors()).problem, None)

    @app.exception_handler(ApiError)
    async def _api(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _response(error.problem, error.headers)

    async def _database(_request: Request, error: Exception) -> Response:
        reason = str(getattr(error, "orig", None) or error) or "it did not answer in time"
        unavailable = UnavailableError(
            f"The database cannot be used now: {reason.splitlines()[0]}.",
            way_out="Nothing was changed; try again.",
        )
        return _response(unavailable.problem, {"Retry-After": "1"})

    @app.exception_handler(DataError)
    async def _data(_request: Request, error: Exception) -> Response:
        assert isinstance(error, DataError)
        reason = str(error.orig).strip().splitlines()[0]
        problem = InvalidError(
            f"The database cannot hold a value of this request: {reason}.",
            way_out="Shorten it, and leave control characters out.",
        ).problem
        return _response(problem, None)

    for kind in (DBAPIError, PoolTimeoutError, asyncio.TimeoutError):
        app.add_exception_handler(kind, _database)


def _response(problem: Problem, headers: Mapping[str, str] | None) -> Response:
    return Response(
        problem_json(problem),
        status_code=problem.status,
        headers=dict(headers or {}),
        media_type=PROBLEM_TYPE,
    )


def invalid(
    errors: Sequence[Mapping[str, Any]],
    *,
    prefix: tuple[str | int, ...] = (),
    model: type[BaseModel] | None = None,
) -> ApiError:
    """The first of pydantic's `errors` as an `ApiError`; `model` lets it name the allowed range."""
    error = errors[0]
    location = [*prefix, *error["loc"]]
    if len(location) > 1 and location[0] in PLACES:
        location = location[1:]
    field = ".".join(str(part) for part in location)
    if error["type"] in NOT_JSON:
        reason = error.get("ctx", {}).get("error", error["msg"])
        return BadRequestError(
            f"The body is not JSON: {reason}.", field="body", way_out="Send one JSON object."
        )
    more = f" ({len(errors) - 1} more of this kind follow.)" if len(errors) > 1 else ""
    missing = error["type"] == "missing"
    value = None if missing else error.get("input")
    named = field if missing else f"{field} = {str(shown(value))[:MAX_NAMED_CHARS]}"
    return InvalidError(
        f"{named}: {error['msg']}.{more}",
        field=field,
        value=value,
        way_out=_way_out(error, model),
    )


def _way_out(error: Mapping[str, Any], model: type[BaseModel] | None) -> str:
    if error["type"] == "missing":
        return "Give it a value."
    if "way_out" in error.get("ctx", {}):
        return str(error["ctx"]["way_out"])
    if model is not None:
        places = (part for part in error["loc"] if part in model.model_fields)
        name = str(next(places, ""))
        if error["type"] == "extra_forbidden":
            return f"Known fields: {', '.join(model.model_fields)}."
        if name in model.model_fields:
            return f"Allowed: {allowed(model, name)}."
    expected = error.get("ctx", {}).get("expected")
    if expected:
        return f"Allowed: {expected}."
    if error["type"] == "extra_forbidden":
        return "Leave it out; /openapi.json lists the known fields."
    return "See /openapi.json for what is allowed."


def allowed(model: type[BaseModel], name: str) -> str:
    """What a field of `model` may hold, in words: a range, the choices, or its type."""
    info = model.model_fields[name]
    if info.description:
        return info.description
    return _in_words(info.annotation, info.metadata)


def _in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _in_words(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        words = (_in_words(one, metadata) for one in arguments if one is not NoneType)
        return ", ".join([*words, *(["null"] if NoneType in arguments else [])])
    if origin is list:
        return f"a list of {_in_words(arguments[0])}"
    if origin is Literal:
        return ", ".join(map(str, arguments))
    bounds = [one for item in metadata for one in getattr(item, "metadata", (item,))]
    low = next((item.ge for item in bounds if hasattr(item, "ge")), None)
    high = next((item.le for item in bounds if hasattr(item, "le")), None)
    if low is not None and high is not None:
        return f"a {'whole number' if annotation is int else 'number'} from {low} to {high}"
    if annotation is str:
        return "texts"
    return "true or false" if annotation is bool else "see /openapi.json"
