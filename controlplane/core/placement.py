"""Which prefill worker takes a request: our rule and the baselines it is compared with.

cost           R31, with the choice to compute what a transfer would bring later, and with the
               time that a request takes from those behind it (`load_weight`)
mooncake       R31 as published: queue + transfer + prefill, transfer above the threshold
cache_aware    the longest prefix, unless the workers' loads are far apart; no transfers
least_loaded   the fewest running; no transfers
round_robin    by turn; no transfers
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, get_args

import msgspec

from controlplane.core.routing import (
    DEFAULT_BALANCING_THRESHOLD,
    NO_COSTS,
    PrefillOption,
    Priced,
    Source,
    TransferCost,
    is_far_behind,
    order_by_cost,
    order_by_turn,
    price,
)

Algorithm = Literal["cost", "mooncake", "cache_aware", "least_loaded", "round_robin"]
ALGORITHMS: Final[tuple[Algorithm, ...]] = get_args(Algorithm)

IMBALANCE_RUNNING: Final = 8
IMBALANCE_RATIO: Final = 1.5
MATCH_SHARE: Final = 0.3
"""cache_aware, as routers of the field do it: loads this far apart, or a shorter match, let the
fewest running win. Routers count requests up to 64 apart as balanced; 8 is kinder to them."""
ALIKE_SHARE: Final = 0.02
ALIKE_SECONDS: Final = 0.002
"""Predictions this close say nothing; what only one node holds decides, then what runs."""
EXPLORED_SLOWDOWN: Final = 1.5
"""Another worker is tried for knowledge's sake only where it costs its user no more than that."""
HALF_WEIGHT_QUEUES: Final = 1.0
"""Shortest queue, in prefills of this request, at which half of `load_weight` counts."""


class Rules(msgspec.Struct, frozen=True):
    """Of the scheduling policy. `explore_share` of requests go to another worker than the best, so
    that predictions of all stay fresh."""

    algorithm: Algorithm = "cost"
    balancing_threshold: float = DEFAULT_BALANCING_THRESHOLD
    explore_share: float = 0.01
    load_weight: float = 4.0


class Placing(msgspec.Struct, frozen=True, gc=False):
    """One request. `turn` counts requests; `chance` is uniform in [0, 1); `shared_tokens` of its
    prefix lie on most nodes."""

    prompt_tokens: int
    turn: int = 0
    chance: float = 1.0
    shared_tokens: int = 0


def place(
    rules: Rules, options: list[PrefillOption], placing: Placing, source: Source | None = None
) -> list[Priced]:
    """The best first, then the order in which others are tried. `source` is ignored by the
    baselines that move no blocks."""
    match rules.algorithm:
        case "cost":
            return _by_total_cost(rules, options, placing, source)
        case "mooncake":
            tokens, threshold = placing.prompt_tokens, rules.balancing_threshold
            return order_by_cost(options, tokens, threshold, source)
        case "cache_aware":
            return _by_prefix(options, placing)
        case "least_loaded":
            return _by_load(options, placing)
        case "round_robin":
            return order_by_turn(options, placing.prompt_tokens, placing.turn)


def shared_tokens(held_tokens: Collection[int], num_nodes: int) -> int:
    """The prefix that more than half of `num_nodes` hold: it says nothing of where to go."""
    middle = num_nodes // 2
    if num_nodes < 2 or len(held_tokens) <= middle:
        return 0
    return sorted(held_tokens, reverse=True)[middle]


# --- cost ---


def _by_total_cost(
    rules: Rules, options: list[PrefillOption], placing: Placing, source: Source | None
) -> list[Priced]:
    best, costs = (source.prefix_tokens, source.costs) if source is not None else (0, NO_COSTS)
    threshold, tokens = rules.balancing_threshold, placing.prompt_tokens
    priced = [
        _cheaper(option, tokens, best, threshold, costs.get(option.node_id)) for option in options
    ]
    if len(priced) < 2:
        return priced
    weight = _load_weight(rules.load_weight, priced)
    work = [one.ttft_seconds - one.option.queue_seconds for one in priced]
    scores = [one.ttft_seconds + weight * own for one, own in zip(priced, work, strict=True)]
    alike = min(scores) * (1 + ALIKE_SHARE) + ALIKE_SECONDS
    count = len(priced)
    ranks = [
        _rank(one, score, alike, placing.shared_tokens, (i - placing.turn) % count)
        for i, (one, score) in enumerate(zip(priced, scores, strict=True))
    ]
    order = sorted(range(len(priced)), key=ranks.__getitem__)
    ordered = [priced[i] for i in order]
    return _explored(ordered, rules, placing) if placing.chance < rules.explore_share else ordered


def _cheaper(
    option: PrefillOption, tokens: int, best: int, threshold: float, transfer: TransferCost | None
) -> Priced:
    """With the transfer or without it, whichever is quicker."""
    own = price(option, tokens, 0, threshold, None)
    if transfer is None or not is_far_behind(own.used_prefix_tokens, min(best, tokens), threshold):
        return own
    moved = price(option, tokens, best, threshold, transfer)
    return moved if moved.ttft_seconds < own.ttft_seconds else own


def _load_weight(most: float, priced: list[Priced]) -> float:
    """Work costs those behind it. While some worker idles nobody is; then only the own time counts."""
    queue = min(one.option.queue_seconds for one in priced)
    if queue <= 0.0:
        return 0.0
    work = min(one.ttft_seconds - one.option.queue_seconds for one in priced)
    return most * queue / (queue + HALF_WEIGHT_QUEUES * max(work, 1e-6))


def _rank(
    one: Priced, score: float, alike: float, shared: int, turn: int
) -> tuple[float, int, int, int]:
    if score > alike:
        return (score, 0, 0, turn)
    distinct = max(0, one.option.own_prefix_tokens - shared)
    return (0.0, -distinct, one.option.running, turn)


def _explored(ordered: list[Priced], rules: Rules, placing: Placing) -> list[Priced]:
    """One of the others first, if none of its kind waits there and it is not much slower."""
    most = ordered[0].ttft_seconds * EXPLORED_SLOWDOWN
    others = [
        i
        for i, one in enumerate(ordered)
        if i and one.ttft_seconds <= most and not one.option.running
    ]
    if not others:
        return ordered
    chosen = others[int(placing.chance / rules.explore_share * len(others))]
    first = msgspec.structs.replace(ordered[chosen], note="tried to keep predictions fresh")
    return [first, *ordered[:chosen], *ordered[chosen + 1 :]]


# --- baselines ---


def _by_prefix(options: list[PrefillOption], placing: Placing) -> list[Priced]:
    if not options:
        return []
    running = [option.running for option in options]
    most, least = max(running), min(running)
    if most - least > IMBALANCE_RUNNING and most > IMBALANCE_RATIO * least:
        return _by_load(options, placing, "loads are far apart")
    longest = max(option.own_prefix_tokens for option in options)
    if longest <= MATCH_SHARE * placing.prompt_tokens:
        return _by_load(options, placing, "more running")
    ordered = sorted(options, key=lambda option: (-option.own_prefix_tokens, option.running))
    return _noted(ordered, placing, "shorter prefix")


def _by_load(
    options: list[PrefillOption], placing: Placing, why: str = "more running"
) -> list[Priced]:
    count = max(1, len(options))
    numbered = enumerate(options)
    keyed = sorted((one.running, (i - placing.turn) % count, i) for i, one in numbered)
    return _noted([options[i] for _, _, i in keyed], placing, why)


def _noted(ordered: list[PrefillOption], placing: Placing, why: str) -> list[Priced]:
    priced = [price(option, placing.prompt_tokens, 0, 1.0, None) for option in ordered]
    return priced[:1] + [msgspec.structs.replace(one, note=why) for one in priced[1:]]
