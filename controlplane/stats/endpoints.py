"""REST of statistics."""

from __future__ import annotations

from typing import Annotated, get_args

from fastapi import APIRouter, Query

from controlplane.deps import PlaneDep
from controlplane.errors import InvalidError
from controlplane.stats.schemas import Matrix, Metric, Overview, SeriesReply
from controlplane.stats.service import KEEP_SECONDS
from controlplane.stats.window import STEP_SECONDS

router = APIRouter(tags=["stats"])
METRICS: tuple[str, ...] = get_args(Metric)
KINDS = ("node:", "worker:", "gateway:", "pair:")
CACHE_METRICS = [
    "prompt_tokens", "hit_tokens", "evicted_capacity", "evicted_quota", "evicted_ssd_capacity",
    "evicted_corrupt", "evicted_failed_write", "evicted_tier_lost", "used_blocks",
    "capacity_blocks", "write_queue_blocks",
]  # fmt: skip
MAX_POINTS = 3600
MAX_SELECTORS = 50
DAY = KEEP_SECONDS[STEP_SECONDS]
MAX_TIME = 4_102_444_800  # the year 2100
WindowQuery = Annotated[int, Query(ge=1, le=DAY)]
StepQuery = Annotated[int, Query(ge=1, le=3600)]


@router.get("/stats/series")
async def series(
    plane: PlaneDep,
    metric: Annotated[str, Query(description="one or more, by comma", max_length=1000)],
    source: Annotated[
        str, Query(description="cluster, node:ID, node:*, ... by comma", max_length=4000)
    ] = "cluster",
    window: WindowQuery = 900,
    step: StepQuery = 10,
    end: Annotated[float | None, Query(ge=0, le=MAX_TIME)] = None,
) -> SeriesReply:
    """Buckets from old to new. The last one is still being filled; null means no data."""
    metrics = [_metric(name) for name in metric.split(",")]
    selectors = [_source(name) for name in source.split(",")]
    if len(selectors) > MAX_SELECTORS:
        raise InvalidError(
            f"source: {len(selectors)} entries, the limit is {MAX_SELECTORS}.",
            field="source",
            value=len(selectors),
            way_out="Ask for node:* and the like.",
        )
    _check_grid(window, step)
    return await plane.stats.series(plane.db, metrics, selectors, window=window, step=step, end=end)


@router.get("/cache/stats")
async def cache_stats(
    plane: PlaneDep, window: WindowQuery = 900, step: StepQuery = 10
) -> SeriesReply:
    """What the cache pages draw: tokens asked for and hit, evictions by cause, fill, per node."""
    _check_grid(window, step)
    return await plane.stats.series(
        plane.db, CACHE_METRICS, ["cluster", "node:*"], window=window, step=step
    )


@router.get("/transfers/matrix")
async def matrix(plane: PlaneDep, window: Annotated[float, Query(ge=1, le=DAY)] = 300) -> Matrix:
    return await plane.stats.matrix(plane.db, window)


@router.get("/overview")
async def overview(
    plane: PlaneDep, window: Annotated[float, Query(ge=10, le=DAY)] = 900
) -> Overview:
    return await plane.overview.build(window)


def _metric(name: str) -> str:
    if name not in METRICS:
        raise InvalidError(
            f"metric: no metric {name!r}.",
            field="metric",
            value=name,
            way_out=f"Allowed: {', '.join(METRICS)}.",
        )
    return name


def _source(name: str) -> str:
    kind = next((kind for kind in KINDS if name.startswith(kind) and len(name) > len(kind)), None)
    odd = "*" in name[:-1] or "\x00" in name
    if (name != "cluster" and kind is None) or odd:
        raise InvalidError(
            f"source: {name!r} is none.",
            field="source",
            value=name,
            way_out="Allowed: cluster, node:ID, worker:ID, gateway:ID, pair:SRC>DST; "
            "a * may stand at the end.",
        )
    return name


def _check_grid(window: int, step: int) -> None:
    fine = step < STEP_SECONDS
    if not fine and step % STEP_SECONDS:
        raise InvalidError(
            f"step: {step} is no multiple of {STEP_SECONDS}.",
            field="step",
            value=step,
            way_out=f"Allowed: 1 to 9 (last hour), or multiples of {STEP_SECONDS} (last day).",
        )
    longest = KEEP_SECONDS[1] if fine else DAY
    if window > longest or window < step or window // step > MAX_POINTS:
        raise InvalidError(
            f"window: {window} s do not go with a step of {step} s.",
            field="window",
            value=window,
            way_out=f"Allowed at this step: {step} to {min(longest, MAX_POINTS * step)} seconds.",
        )
