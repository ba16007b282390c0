"""REST calls about the pool, as values; see controlplane.calls."""

from __future__ import annotations

from controlplane.calls import API, Call
from controlplane.nodes.pool_schemas import PoolReport


def pool_report(window: float = 900) -> Call[PoolReport]:
    return Call("GET", f"{API}/cache/pool", PoolReport, {"window": f"{window:g}"})
