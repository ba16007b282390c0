"""`perilune bench evict`: hit ratios of eviction policies on a trace of requests.

Ratios are in blocks: held blocks of all requests' longest held prefixes over all blocks. `lru` and
`min` store partly filled last blocks, all others never do; hits are of the same total.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from workers.bench.evict_pool import Outcome, replay, replay_min
from workers.bench.evict_traces import TraceRequest, read_trace
from workers.core.errors import ConfigError
from workers.core.ids import BlockHash
from workers.core.policies.registry import POLICIES, make_policy
from workers.core.whatif import FACTORS, WhatIf

CAPACITIES: Final = (1000, 5000, 10_000, 20_000, 30_000)
MIN: Final = "min"
LABELLED: Final = "class+label"
BENCH_POLICIES: Final = (MIN, "lru", *(name for name in POLICIES if name != "lru"), LABELLED)


def run_evict_bench(
    trace_file: Path,
    policies: Sequence[str] = (),
    capacities: Sequence[int] = (),
    *,
    with_whatif: bool = False,
) -> dict[str, Any]:
    """One row for each policy and capacity. ConfigError names the option that cannot work."""
    for name in policies:
        if name not in BENCH_POLICIES:
            known = f"Take one of: {', '.join(BENCH_POLICIES)}."
            raise ConfigError("--policy", name, "no such policy", known)
    for capacity in capacities:
        if capacity < 1:
            raise ConfigError("--capacity", capacity, "is no number of blocks", "Take 1 or more.")
    trace = read_trace(trace_file)
    num_blocks = sum(len(request.blocks) for request in trace)
    rows = list(_rows(trace, policies or BENCH_POLICIES, capacities or CAPACITIES, num_blocks))
    result: dict[str, Any] = {
        "trace": trace_file.name, "requests": len(trace), "blocks": num_blocks, "rows": rows
    }  # fmt: skip
    if with_whatif:
        result["whatif"] = [
            row for capacity in capacities or (10_000,) for row in whatif_rows(trace, capacity)
        ]
    return result


def whatif_rows(trace: Sequence[TraceRequest], capacity: int) -> list[dict[str, Any]]:
    """The sampled curve beside LRU's exact hit rates."""
    keys = {block: _hashed(block) for request in trace for block in request.blocks}
    whatif = WhatIf(capacity, half_life_seconds=1e9)
    for request in trace:
        whatif.observe([keys[block] for block in request.blocks], request.now)
    num_ids = _num_ids(trace)
    num_blocks = sum(len(request.blocks) for request in trace)
    rows = []
    for point in whatif.curve(capacity):
        outcome = replay(make_policy("lru"), trace, max(1, point.capacity_blocks), num_ids)
        exact = outcome.hit_blocks / num_blocks
        error = None if point.hit_rate is None else round(point.hit_rate - exact, 6)
        rows.append(
            {
                "capacity_factor": point.capacity_factor,
                "capacity_blocks": point.capacity_blocks,
                "sampled_share": round(whatif.sampled_share, 6),
                "hit_rate": point.hit_rate,
                "exact_hit_rate": round(exact, 6),
                "error": error,
            }
        )
    assert len(rows) == len(FACTORS)
    return rows


def table(result: dict[str, Any]) -> str:
    """The same for eyes: hit ratio and time for each block, that of LRU being 1."""
    rows = result["rows"]
    capacities = sorted({row["capacity_blocks"] for row in rows})
    by_cell = {(row["policy"], row["capacity_blocks"]): row for row in rows}
    lines = [
        f"{result['trace']}: {result['requests']:,} requests, {result['blocks']:,} blocks; "
        "hit ratio (time a block, LRU = 1)",
        "  ".join([f"{'policy':<12}", *(f"{capacity:>14,}" for capacity in capacities)]),
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = [_cell(by_cell[policy, capacity]) for capacity in capacities]
        lines.append("  ".join([f"{policy:<12}", *cells]).rstrip())
    lines.extend(map(_whatif_line, result.get("whatif", [])))
    return "\n".join(lines)


def _whatif_line(row: dict[str, Any]) -> str:
    what = f"what if {row['capacity_blocks']:>7,} blocks ({row['capacity_factor']:g}x)"
    if row["hit_rate"] is None:
        return f"{what}: too few requests to say"
    exact = f"exactly {row['exact_hit_rate']:.4f}, error {row['error']:+.4f}"
    return f"{what}: {row['hit_rate']:.4f}, {exact}"


def _cell(row: dict[str, Any]) -> str:
    beside = row["ns_over_lru"]
    return f"{row['hit_ratio']:.4f} {'' if beside is None else f'({beside:.1f})':>7}"


def _rows(
    trace: Sequence[TraceRequest],
    policies: Iterable[str],
    capacities: Iterable[int],
    num_blocks: int,
) -> Iterable[dict[str, Any]]:
    num_ids = _num_ids(trace)
    gc.collect()
    gc.freeze()  # the trace is not the policies' garbage
    try:
        for capacity in capacities:
            lru_ns: float | None = None
            for policy in sorted(policies, key=lambda name: name != "lru"):
                outcome = _outcome(policy, trace, capacity, num_ids)
                ns = outcome.seconds / max(1, num_blocks) * 1e9
                lru_ns = ns if policy == "lru" else lru_ns
                yield {
                    "policy": policy,
                    "capacity_blocks": capacity,
                    "hit_ratio": round(outcome.hit_blocks / max(1, num_blocks), 6),
                    "ns_per_block": round(ns, 1),
                    "ns_over_lru": None if not lru_ns else round(ns / lru_ns, 2),
                }
    finally:
        gc.unfreeze()


def _outcome(policy: str, trace: Sequence[TraceRequest], capacity: int, num_ids: int) -> Outcome:
    if policy == MIN:
        return replay_min(trace, capacity, num_ids)
    labelled = policy == LABELLED
    made = make_policy("class" if labelled else policy)
    return replay(made, trace, capacity, num_ids, labelled=labelled)


def _num_ids(trace: Sequence[TraceRequest]) -> int:
    return 1 + max((block for request in trace for block in request.blocks), default=0)


def _hashed(block: int) -> BlockHash:
    return BlockHash(blake3(block.to_bytes(8, "little")).digest(16))
