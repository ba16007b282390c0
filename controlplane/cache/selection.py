"""What an operator selected, in the agents' terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controlplane.cache.names import SHORT_DIGITS, tenant_of
from controlplane.cache.schemas import CacheReplicate, Selected
from controlplane.errors import InvalidError, NotFoundError
from controlplane.nodes.service import NodeRegistry
from workers.core.cache_messages import Selection

DIGEST_DIGITS = 64


def selection_of(spec: Mapping[str, Any]) -> Selection:
    """The agents' form of a job's spec, whose namespace is whole."""
    return Selection(
        bytes.fromhex(spec.get("namespace") or ""),
        tenant_of(spec.get("tenant")),
        bytes.fromhex(spec.get("key") or ""),
    )


def spec_of(nodes: NodeRegistry, body: Selected | CacheReplicate) -> dict[str, object]:
    """A job's spec: what of the body says something, its namespace written out.

    NotFoundError: a node or namespace that nobody knows; InvalidError: an ambiguous namespace.
    """
    spec = body.model_dump(exclude_none=True, exclude={"reason", "confirm"})
    for field in ("node", "source", "destination"):
        if field in spec:
            nodes.find(str(spec[field]))
    if body.namespace is not None:
        spec["namespace"] = whole_namespace(nodes, body.namespace)
    return spec


def whole_namespace(nodes: NodeRegistry, text: str) -> str:
    """The digest that begins like this. A whole one need not be known: its blocks may be left."""
    if len(text) == DIGEST_DIGITS:
        return text
    known = sorted({digest for node in nodes.list() for digest in node.namespaces})
    found = [digest for digest in known if digest.startswith(text)]
    shown = ", ".join(digest[:SHORT_DIGITS] for digest in (found or known)[:10]) or "none"
    if not found:
        raise NotFoundError(
            f"No namespace begins with {text}.",
            field="namespace",
            value=text,
            way_out=f"Known: {shown}.",
        )
    if len(found) > 1:
        raise InvalidError(
            f"namespace = {text}: {len(found)} namespaces begin like this.",
            field="namespace",
            value=text,
            way_out=f"Give more digits: {shown}.",
        )
    return found[0]
