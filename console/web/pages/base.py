"""What every page is, and what every page reads."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from console.viewmodel import filters
from console.viewmodel.filters import FieldKind, Filter, FilterError
from console.viewmodel.heatmap import Heatmap
from console.viewmodel.state import ConsoleState, Snapshot
from console.viewmodel.table import Table
from console.web.viewer import Viewer
from controlplane.client import AsyncClient

MONOTONIC_NOW = 0.0
"""A page is drawn in the moment its data came: rows are as old as the server says."""
MAX_ROWS = 50
MAX_REMEMBERED = 32
FRESH_SECONDS = 0.9
MAX_ROWS_FILTERED = 500

Crumbs = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Page:
    """`data` goes to the template; `nav` is the page's place in the navigation."""

    template: str
    title: str
    nav: str
    crumbs: Crumbs
    data: Mapping[str, Any] = field(default_factory=dict)
    has_figure: bool = False
    has_form: bool = False
    has_acts: bool = False


@dataclass(frozen=True, slots=True)
class _Remembered:
    heatmap: Heatmap
    at: float


class Memory:
    """The last drawing of each figure. All who look within a second share one; the next starts
    from its levels, so that a cell changes colour only well past an edge."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, _Remembered] = OrderedDict()

    def fresh(self, key: str, now: float) -> Heatmap | None:
        """The drawing, if it is not older than a second; `now` in seconds since the epoch."""
        found = self._last.get(key)
        return found.heatmap if found and 0 <= now - found.at < FRESH_SECONDS else None

    def last(self, key: str) -> Heatmap | None:
        """The drawing, however old."""
        found = self._last.get(key)
        return found.heatmap if found else None

    def put(self, key: str, heatmap: Heatmap, now: float) -> Heatmap:
        self._last[key] = _Remembered(heatmap, now)
        self._last.move_to_end(key)
        while len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)
        return heatmap


@dataclass(frozen=True, slots=True)
class Context:
    """What a page is made from: the client, who looks, and what the frame has already read."""

    client: AsyncClient
    viewer: Viewer
    snapshot: Snapshot
    memory: Memory

    @property
    def now(self) -> float:
        """The control plane's time, in seconds since the epoch."""
        return self.snapshot.overview.at if self.snapshot.overview else 0.0


async def read_context(client: AsyncClient, viewer: Viewer, memory: Memory) -> Context:
    """Overview, nodes and workers: what frame and most pages show. Raises ClientError."""
    overview, nodes, workers = await asyncio.gather(
        client.overview(), client.nodes(), client.workers()
    )
    state = ConsoleState()
    state.load(MONOTONIC_NOW, overview=overview, nodes=nodes, workers=workers)
    return Context(client, viewer, state.snapshot(), memory)


async def curl_of(context: Context) -> str:
    """A request to try, for a gateway and a model that are there; empty while none is."""
    gateways = await context.client.gateways()
    models = [worker.model for worker in context.snapshot.workers if worker.model]
    if not gateways or not models:
        return ""
    first = next((g for g in gateways if g.state == "ready"), gateways[0])
    body = json.dumps({"model": models[0], "messages": [{"role": "user", "content": "Hello"}]})
    return (
        f"curl {first.url.rstrip('/')}/v1/chat/completions"
        f" -H 'Content-Type: application/json' -d '{body}'"
    )


@dataclass(frozen=True, slots=True)
class Filtered:
    """A table after the filter; `error` is what is wrong with the filter, `count` how many stay."""

    table: Table
    error: str
    count: str


def filtered(
    table: Table, viewer: Viewer, fields: Mapping[str, FieldKind], limit: int | None = None
) -> Filtered:
    """A filter that cannot be read leaves the table alone and says where it stumbles."""
    try:
        chosen = filters.parse(viewer.filter, fields)
    except FilterError as error:
        return Filtered(_first(table, table.rows, limit), str(error), f"{len(table.rows)} rows")
    rows = chosen.apply(table.rows)
    return Filtered(_first(table, rows, limit, chosen), "", _count(len(rows), table, chosen))


def _first(
    table: Table, rows: Sequence[Any], limit: int | None, chosen: Filter | None = None
) -> Table:
    empty = table.empty
    if table.rows and chosen and chosen.source:
        empty = f"Nothing matches {chosen.source}. {len(table.rows)} without the filter."
    return replace(table, rows=tuple(rows[:limit]), empty=empty)


def _count(num: int, table: Table, chosen: Filter) -> str:
    return f"{num} of {len(table.rows)}" if chosen.source else f"{num} shown"
