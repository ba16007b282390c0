"""Eviction policies by the name that cache policies use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workers.core.errors import ConfigError
from workers.core.policies.base import EvictionPolicy
from workers.core.policies.credit import CreditPolicy
from workers.core.policies.decay import DecayPolicy
from workers.core.policies.lfu import LfuPolicy
from workers.core.policies.lru import LruPolicy
from workers.core.policies.lru2 import Lru2Policy
from workers.core.policies.params import Param, resolve
from workers.core.policies.request_class import ClassPolicy
from workers.core.policies.score import ScorePolicy

_CLASSES: Final[tuple[type[EvictionPolicy], ...]] = (
    DecayPolicy, CreditPolicy, LruPolicy, LfuPolicy, Lru2Policy, ScorePolicy,
    ClassPolicy,
)  # fmt: skip
POLICIES: Final = {policy.name: policy for policy in _CLASSES}
POLICY_PARAMS: Final[dict[str, Mapping[str, Param]]] = {
    name: policy.declared for name, policy in POLICIES.items()
}
DEFAULT_POLICY: Final = "decay"


def make_policy(name: str, params: Mapping[str, float] | None = None) -> EvictionPolicy:
    """A policy without blocks. ConfigError names the field, its value and the way out."""
    return _class_of(name)(params)


def check_policy(name: str, params: Mapping[str, float]) -> dict[str, float]:
    """All parameters of that policy with these set, without making it. ConfigError."""
    return resolve(name, _class_of(name).declared, params)


def _class_of(name: str) -> type[EvictionPolicy]:
    if name not in POLICIES:
        raise ConfigError(
            "eviction", name, "no such policy", f"Take one of: {', '.join(sorted(POLICIES))}."
        )
    return POLICIES[name]
