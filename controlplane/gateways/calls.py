"""REST calls on requests in flight as values, for `Client.send`."""

from __future__ import annotations

from urllib.parse import quote

from controlplane.calls import API, Call
from controlplane.gateways.running_schemas import RequestCancel, RequestCancelled, RunningList

ASK_TIMEOUT_SECONDS = 10.0


def running(limit: int = 200) -> Call[RunningList]:
    """All gateways are asked, within their own bounds."""
    path, query = f"{API}/requests", {"limit": str(limit)}
    return Call("GET", path, RunningList, query, timeout_seconds=ASK_TIMEOUT_SECONDS)


def cancel(request_id: str, body: RequestCancel) -> Call[RequestCancelled]:
    """End one."""
    path = f"{API}/requests/{quote(request_id, safe='')}/cancel"
    return Call("POST", path, RequestCancelled, body=body, timeout_seconds=ASK_TIMEOUT_SECONDS)
