"""Lists, series and events made from recorded objects, as the control plane answers with them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from fnmatch import fnmatch
from typing import Any

from controlplane.decisions.schemas import Decision, DecisionList
from controlplane.stats.schemas import Series, SeriesReply


def page_of(rows: list[Decision], limit: int, cursor: str) -> DecisionList:
    after = int(cursor or 0) + limit
    more = {"next_cursor": str(after)} if after < len(rows) else {}
    return DecisionList(items=rows[after - limit : after], total=len(rows), **more)


def series_of(
    recorded: Any, metrics: list[str], source: str, window: float, step: float
) -> SeriesReply:
    num = int(window // step) + 1
    start = (int(recorded.at // step) - num + 1) * step
    found = [
        Series(metric=metric, source=name, values=([None] * num + values)[-num:])
        for (name, metric), values in recorded.series.items()
        if metric in metrics and any(fnmatch(name, one) for one in source.split(","))
    ]
    return SeriesReply(start=start, step_seconds=step, series=found)


async def ticks(recorded: Any) -> AsyncIterator[str]:
    for number in itertools.count(1):
        data = json.dumps({"at": recorded.at})
        yield f"id: boot-{number}\nevent: tick\ndata: {data}\n\n"
        await asyncio.sleep(1)
