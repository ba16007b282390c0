"""Which nodes and pairs a run looks at. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.doctor.schemas import DoctorRun

MAX_PAIRS = 128


def nodes_of(body: DoctorRun, known: Sequence[str]) -> list[str]:
    """Whose facts are asked for: with one node or pair, still of all ends of its pairs."""
    if body.pair is not None:
        return list(dict.fromkeys(body.pair.split(":")))
    if body.node is not None and not body.probe:
        return [body.node]
    return list(known)


def shown(body: DoctorRun, node: str) -> bool:
    """Is this node's own part of the report?"""
    return body.node in (None, node)


def pairs_of(body: DoctorRun, nodes: Sequence[str]) -> tuple[list[tuple[str, str]], int]:
    """(source, destination), at most `MAX_PAIRS`, and how many were left out.

    In rounds, so that each node takes part however few pairs there may be.
    """
    if not body.probe:
        return [], 0
    count = len(nodes)
    pairs = [
        (nodes[index], nodes[(index + step) % count])
        for step in range(1, count)
        for index in range(count)
        if body.node is None or body.node in (nodes[index], nodes[(index + step) % count])
    ]
    return pairs[:MAX_PAIRS], max(0, len(pairs) - MAX_PAIRS)
