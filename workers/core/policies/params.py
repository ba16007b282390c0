"""Parameters of eviction policies: what there is, within which bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from workers.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Param:
    """One number, `low` to `high` inclusive; its unit is the end of its name."""

    default: float
    low: float
    high: float
    meaning: str


def resolve(
    policy: str, declared: Mapping[str, Param], given: Mapping[str, float]
) -> dict[str, float]:
    """Defaults with what was given. ConfigError for unknown names and values out of bounds."""
    values = {name: param.default for name, param in declared.items()}
    for name, value in given.items():
        values[name] = _checked(policy, declared, name, value)
    return values


def _checked(policy: str, declared: Mapping[str, Param], name: str, value: float) -> float:
    field = f"eviction_params.{name}"
    param = declared.get(name)
    if param is None:
        known = f"It has {', '.join(sorted(declared))}." if declared else "It has none."
        raise ConfigError(field, value, f"the policy {policy} has no such parameter", known)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ConfigError(field, value, "is no number", f"The default is {param.default:g}.")
    if not param.low <= value <= param.high:
        raise ConfigError(
            field, value, f"is not within {param.low:g} to {param.high:g}",
            f"It is {param.meaning}; the default is {param.default:g}.",
        )  # fmt: skip
    return float(value)
