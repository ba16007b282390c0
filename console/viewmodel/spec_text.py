"""Values of a policy's spec as text that one edits, and back."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Literal, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from workers.core.policies.params import Param
from workers.core.policies.registry import POLICY_PARAMS

NONE = "none"
MAPPING = "name=number, name=number, or none"
PARAMS_FIELD = "eviction_params"
POLICY_FIELD = "eviction"


class SpecTextError(ValueError):
    """A text that says no value; the message is what it must be."""


def show(value: object) -> str:
    """A spec's value as it is written in a draft: `acme=4, batch=0.5`, `none`, `true`."""
    if value is None or value in ({}, []):
        return NONE
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={show(one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def read(info: FieldInfo, text: str) -> object:
    """What the schema is given for a field; raises `SpecTextError`."""
    if is_mapping(info):
        return read_mapping(text, allowed(info))
    if is_list(info):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [] if parts == [NONE] else parts
    if text.lower() == NONE and is_optional(info.annotation):
        return None
    return text


def read_mapping(text: str, form: str = MAPPING) -> dict[str, str]:
    """`acme=4, batch=0.5`; a name may hold `=`, the last one counts."""
    if text.lower() in ("", NONE):
        return {}
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().rpartition("=")
        if not equals or not name.strip() or not value.strip():
            raise SpecTextError(form)
        found[name.strip()] = value.strip()
    return found


def allowed(info: FieldInfo) -> str:
    """`off | observe | enforce`, `1 to 600,000`, `true | false`."""
    options = choices(info)
    if options:
        return " | ".join(options)
    if is_mapping(info):
        words = choices_of_values(info)
        return f"name={'|'.join(words)}, name=..., or none" if words else MAPPING
    if is_list(info):
        return "name, name"
    if _bare_type(info.annotation) is str:
        return "a name"
    low, high = _bounds(info)
    whole = " (whole number)" if _bare_type(info.annotation) is int else ""
    tail = ", or none" if is_optional(info.annotation) else ""
    if low is not None and high is not None:
        return f"{plain(low)} to {plain(high)}{whole}{tail}"
    return f"a number{tail}" if low is None else f"at least {plain(low)}{whole}{tail}"


def choices(info: FieldInfo) -> tuple[str, ...]:
    """The words that a field may have; empty for numbers."""
    bare = _bare_type(info.annotation)
    if bare is bool:
        return ("true", "false")
    return tuple(map(str, get_args(bare))) if get_origin(bare) is Literal else ()


def choices_of_values(info: FieldInfo) -> tuple[str, ...]:
    """The words that a mapping's values may be; empty for numbers."""
    value = _bare_type(get_args(_bare_type(info.annotation))[1])
    return tuple(map(str, get_args(value))) if get_origin(value) is Literal else ()


def params_of(policy: str) -> Mapping[str, Param]:
    """Parameters of an eviction policy, by name."""
    return POLICY_PARAMS.get(policy, {})


def read_param(param: Param, text: str) -> float:
    """A parameter within its bounds; raises `SpecTextError`."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not param.low <= value <= param.high:
        raise SpecTextError(allowed_param(param))
    return value


def allowed_param(param: Param) -> str:
    """`1 to 86,400; default 600`."""
    return f"{plain(param.low)} to {plain(param.high)}; default {plain(param.default)}"


def is_mapping(info: FieldInfo) -> bool:
    """Names with numbers, such as quotas."""
    return get_origin(_bare_type(info.annotation)) is dict


def is_list(info: FieldInfo) -> bool:
    """Names in an order that counts, such as priority classes."""
    return get_origin(_bare_type(info.annotation)) is list


def is_optional(annotation: object) -> bool:
    """None is a value of it."""
    if get_origin(annotation) is Annotated:
        return is_optional(get_args(annotation)[0])
    return get_origin(annotation) in (typing.Union, types.UnionType) and type(None) in get_args(
        annotation
    )


def plain(value: float) -> str:
    """A bound: 600,000; 0.05."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def _bare_type(annotation: object) -> object:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _bare_type(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return _bare_type(next(a for a in get_args(annotation) if a is not type(None)))
    return annotation


def _bounds(info: FieldInfo) -> tuple[float | None, float | None]:
    metadata = [*info.metadata, *getattr(info.annotation, "__metadata__", ())]
    low = next((m.ge for m in metadata if isinstance(m, annotated_types.Ge)), None)
    high = next((m.le for m in metadata if isinstance(m, annotated_types.Le)), None)
    return (_number(low), _number(high))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
