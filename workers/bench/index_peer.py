"""The peer's side of `perilune bench index`: runs under the peers' own interpreter.

    python index_peer.py DATA

DATA is a pickle of (events, deep queries, shallow queries, rounds of queries, builds); an event is
(node, payload). Prints one JSON object. It imports nothing of this project, which that interpreter
does not have.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    from dynamo._core import RadixTree  # type: ignore[import-not-found]  # noqa: PLC0415

    events, deep, shallow, rounds, builds = pickle.loads(Path(path).read_bytes())
    gc.collect()
    gc.freeze()
    before = _rss_bytes()
    tree, spent, cpu = _apply(RadixTree(), events)
    used = _rss_bytes() - before
    built = [(spent, cpu)] + [_apply(RadixTree(), events)[1:] for _ in range(builds - 1)]
    result = {
        "spent_ns": [spent for spent, _ in built],
        "apply_cpu_s": min(cpu for _, cpu in built),
        "deep_p50_us": _best_median_us(_find(tree, deep), rounds),
        "shallow_p50_us": _best_median_us(_find(tree, shallow), rounds),
        "longest": [max(tree.find_matches(q).scores.values(), default=0) for q in deep],
        "bytes": used,
    }
    print(json.dumps(result))


def _apply(tree: Any, events: list[tuple[int, bytes]]) -> tuple[Any, list[int], float]:
    """The tree, nanoseconds of each event, CPU seconds of all."""
    spent = []
    cpu = time.process_time()
    for node, payload in events:
        started = time.perf_counter_ns()
        tree.apply_event(node, payload)
        spent.append(time.perf_counter_ns() - started)
    return tree, spent, time.process_time() - cpu


def _find(tree: Any, queries: list[list[int]]) -> list[int]:
    """Nanoseconds of each query, with the scores as a dict: what a router reads."""
    spent = []
    for query in queries:
        fresh = [value + 0 for value in query]
        started = time.perf_counter_ns()
        tree.find_matches(fresh).scores  # noqa: B018
        spent.append(time.perf_counter_ns() - started)
    return spent


def _best_median_us(spent: list[int], rounds: int) -> float:
    """The lowest median of the rounds: other programs' noise only adds."""
    size = len(spent) // rounds
    return min(_median_us(spent[i * size : (i + 1) * size]) for i in range(rounds))


def _median_us(spent: list[int]) -> float:
    return sorted(spent)[len(spent) // 2] / 1e3


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main(sys.argv[1])
