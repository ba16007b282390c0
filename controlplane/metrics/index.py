"""Values of the index's audit and of the directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from controlplane.index_audit.schemas import DirectoryState
from controlplane.plane import Plane


def index_values(plane: Plane) -> Iterator[tuple[str, Sequence[str], float]]:
    audit = plane.index_audit
    yield "index_blocks", (), audit.index.num_distinct
    yield "index_entries", (), audit.index.num_blocks()
    yield "index_dropped_total", (), audit.index.num_dropped
    for state in get_args(DirectoryState):
        yield "directory_state", (state,), audit.directory.state == state
    yield "directory_nodes", (), audit.directory.nodes
    for node_id, found in audit.nodes.items():
        yield "index_following", (node_id,), audit.state(node_id) == "following"
        yield "index_resyncs_total", (node_id,), found.resyncs_total
        for tier, counts in found.tiers.items():
            yield "index_checks_total", (node_id, tier), counts.checks_total
            yield "index_stale_total", (node_id, tier), counts.stale_total
            if counts.stale_rate is not None:
                yield "index_stale_rate", (node_id, tier), counts.stale_rate
