"""Eviction policies by the name that cache policies use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workers.core.errors import ConfigError
from workers.core.policies.base import EvictionPolicy
from workers.core.policies.decay import DecayPolicy
from workers.core.policies.lru import LruPolicy
from workers.core.policies.params import Param

POLICIES: Final[dict[str, type[EvictionPolicy]]] = {
    policy.name: policy for policy in (DecayPolicy, LruPolicy)
}
POLICY_PARAMS: Final[dict[str, Mapping[str, Param]]] = {
    name: policy.declared for name, policy in POLICIES.items()
}
DEFAULT_POLICY: Final = "decay"


def make_policy(name: str, params: Mapping[str, float] | None = None) -> EvictionPolicy:
    """A policy without blocks. ConfigError names the field, its value and the way out."""
    if name not in POLICIES:
        raise ConfigError(
            "eviction", name, "no such policy", f"Take one of: {', '.join(sorted(POLICIES))}."
        )
    return POLICIES[name](params)
