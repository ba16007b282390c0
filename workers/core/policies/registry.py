"""Eviction policies by the name that cache policies use."""

from __future__ import annotations

from collections.abc import Callable

from workers.core.errors import ConfigError
from workers.core.policies.base import EvictionPolicy
from workers.core.policies.lru import LruPolicy

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy}


def make_policy(name: str) -> EvictionPolicy:
    if name not in POLICIES:
        raise ConfigError(
            "eviction", name, "no such policy", f"Take one of: {', '.join(sorted(POLICIES))}."
        )
    return POLICIES[name]()
