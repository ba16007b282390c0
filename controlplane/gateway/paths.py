"""Which nodes can pull blocks from which, and what that costs: as legs showed it, or else as the
nodes' agents measured it."""

from __future__ import annotations

from collections import deque

from controlplane.core.prediction import TransferModel
from controlplane.core.routing import TransferCost
from controlplane.gateway.bodies import Holder
from workers.core.stats_messages import PoolStats
from workers.core.transfer_choice import PRIORS
from workers.core.transfer_stats import LinkStats

MAX_PAIRS = 4096
"""Pairs of nodes whose transfers are learned; further ones go by the agents' measurements."""
_PRIOR = PRIORS["tcp"]


class Paths:
    """`holders`: nodes that others reach; `costs[source][destination]`. Fed by `take`."""

    def __init__(self) -> None:
        self.holders: dict[str, Holder] = {}
        self.costs: dict[str, dict[str, TransferCost]] = {}
        self._rates: dict[tuple[str, str], float] = {}
        self.learned: dict[tuple[str, str], TransferModel] = {}
        self._moved: deque[tuple[str, str, int, float]] = deque(maxlen=256)

    def take(self, stats: PoolStats) -> None:
        """A node's own report: whether it can be reached, and what its pulls have cost."""
        node_id = stats.node_id
        bytes_per_token = _bytes_per_token(stats)
        if not stats.endpoint or bytes_per_token is None:
            self.drop(node_id)
            return
        self.holders[node_id] = Holder(node_id, stats.endpoint, stats.incarnation)
        best = _best_links(stats.transfers.links)
        for source in self.holders:
            if source != node_id:
                link = best.get(source)
                rate = link.bytes_per_second if link is not None else None
                self._rates[source, node_id] = rate or _PRIOR.bytes_per_second
                measured = _cost(link, bytes_per_token)
                self.costs.setdefault(source, {})[node_id] = self._known(source, node_id, measured)

    def bytes_per_second(self, source: str, destination: str) -> float:
        """Of the quickest way between the two, as their agents measured it."""
        return self._rates.get((source, destination), _PRIOR.bytes_per_second)

    def moved(self, source: str, destination: str, tokens: int, seconds: float) -> None:
        """A leg's transfer, for `learn`; of many in a short time the last ones count."""
        self._moved.append((source, destination, tokens, seconds))

    def learn(self) -> None:
        """Fit the costs of pairs to what came since: off the request path."""
        while self._moved:
            source, destination, tokens, seconds = self._moved.popleft()
            cost = self.costs.get(source, {}).get(destination)
            if cost is None:
                continue  # one of them has left
            model = self.learned.get((source, destination))
            if model is None:
                if len(self.learned) >= MAX_PAIRS:
                    continue
                model = TransferModel(cost.base_seconds, cost.seconds_per_token)
                self.learned[source, destination] = model
            model.observe(tokens, seconds)
            self.costs[source][destination] = self._known(source, destination, cost)

    def drop(self, node_id: str) -> None:
        """The node has left, or can no longer be reached."""
        self.holders.pop(node_id, None)
        self.costs.pop(node_id, None)
        for source, costs in list(self.costs.items()):
            costs.pop(node_id, None)
            if not costs:
                del self.costs[source]
        for pairs in (self.learned, self._rates):
            for pair in [pair for pair in pairs if node_id in pair]:
                del pairs[pair]

    def _known(self, source: str, destination: str, measured: TransferCost) -> TransferCost:
        model = self.learned.get((source, destination))
        if model is None or not model.is_fitted:
            return measured
        return TransferCost(model.seconds_per_token, model.base_seconds)


def _bytes_per_token(stats: PoolStats) -> float | None:
    for namespace in stats.namespaces:
        return stats.block_bytes / namespace.spec.block_tokens
    return None


def _best_links(links: list[LinkStats]) -> dict[str, LinkStats]:
    """For each peer the quickest measured path that is not shut by its breaker."""
    best: dict[str, LinkStats] = {}
    for link in links:
        if link.bytes_per_second is None or link.breaker == "open":
            continue
        known = best.get(link.peer)
        if known is None or link.bytes_per_second > (known.bytes_per_second or 0.0):
            best[link.peer] = link
    return best


def _cost(link: LinkStats | None, bytes_per_token: float) -> TransferCost:
    if link is None or not link.bytes_per_second:
        return TransferCost(bytes_per_token / _PRIOR.bytes_per_second, _PRIOR.latency_seconds)
    return TransferCost(bytes_per_token / link.bytes_per_second, link.latency_seconds or 0.0)
