"""REST calls on transfers between nodes as values, for `Client.send`."""

from __future__ import annotations

from controlplane.calls import API, Call
from controlplane.transfers.schemas import NodeTransferList


def nodes(
    source: str | None = None,
    destination: str | None = None,
    node: str | None = None,
    limit: int | None = None,
    *,
    links: bool = True,
) -> Call[NodeTransferList]:
    """Filters that are not given match everything."""
    given = {"source": source, "destination": destination, "node": node, "limit": limit}
    params = {name: str(value) for name, value in given.items() if value is not None}
    if not links:
        params["links"] = "false"
    return Call("GET", f"{API}/transfers/nodes", NodeTransferList, params)
