"""What people call tenants, namespaces and what a job acts on. Pure, and without the server's needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHORT_DIGITS = 12
"""Of a namespace's digest, where people read it."""
DEFAULT_TENANT = "default"
"""How people call those without a cache salt; the pool calls them ''."""


def tenant_of(name: str | None) -> str | None:
    return "" if name == DEFAULT_TENANT else name


def tenant_name(tenant: str) -> str:
    return tenant or DEFAULT_TENANT


def target_name(spec: Mapping[str, Any]) -> str:
    """What a job acts on, as people type it to agree: node/namespace/tenant/key, what is given."""
    parts = [spec.get("node"), (spec.get("namespace") or "")[:SHORT_DIGITS]]
    parts += [spec.get("tenant"), spec.get("key")]
    named = "/".join(str(part) for part in parts if part)
    if spec.get("source"):
        named = f"{spec['source']}>{spec['destination']}/{named}"
    return named[:300]
