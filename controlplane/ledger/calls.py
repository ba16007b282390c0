"""REST calls on the ledger as values, for `Client.send`."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.calls import API, Call
from controlplane.ledger.schemas import LedgerList, LedgerSummary


def ledger(
    kind: str | None = None,
    window: float | None = None,
    limit: int | None = None,
    cursor: str | None = None,
    **filters: str | None,
) -> Call[LedgerList]:
    """`filters`: model, tenant, priority. What is not given matches everything."""
    given = {"kind": kind, "window": window, "limit": limit, "cursor": cursor, **filters}
    return Call("GET", f"{API}/ledger", LedgerList, _params(given))


def summary(window: float | None = None, **filters: str | None) -> Call[LedgerSummary]:
    """`filters`: model, tenant, priority."""
    return Call(
        "GET", f"{API}/ledger/summary", LedgerSummary, _params({"window": window, **filters})
    )


def _params(given: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in given.items() if value is not None}
