"""Samples of gateways and nodes become one bucket a source and second. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.core.health import DataPathState
from controlplane.gateways.schemas import HISTOGRAM_BOUNDS_SECONDS, GatewayStats
from controlplane.stats.bucket import NUM_COUNTS, TRANSFER_HISTOGRAM, Bucket, new_bucket
from controlplane.stats.counters import CounterTracker, HistogramTracker, Step
from controlplane.stats.histogram import bucket_of
from controlplane.stats.node_pairs import node_pairs
from controlplane.stats.pool_values import counters_of, gauges_of
from workers.core.messages import LegReport
from workers.core.stats_messages import PoolStats

MAX_SOURCES = 2048
MAX_PAIRS = 4096
BRIDGE_SECONDS = 2.0
"""A source sampled less than this ago did nothing in a second without a sample; older: a gap."""

GATEWAY_COUNTERS = (
    "requests", "rejected", "failed", "prompt_tokens", "hit_tokens", "output_tokens",
    "slo_met", "slo_missed", "shed", "probes", "probes_met",
)  # fmt: skip
TOKEN_COUNTERS = frozenset({"prompt_tokens", "hit_tokens"})


@dataclass(slots=True)
class _Source:
    """One node or gateway: its trackers, its open bucket, its last gauges."""

    counters: CounterTracker = field(default_factory=CounterTracker)
    histograms: HistogramTracker = field(default_factory=HistogramTracker)
    sampled_at: float = 0.0
    open: Bucket | None = None
    gauges: dict[str, float] = field(default_factory=dict)
    counter_names: tuple[str, ...] = ()

    def take(self, step: Step, gauges: dict[str, float], at: float) -> Bucket:
        bucket = self.open = self.open or new_bucket()
        if step.increments is not None:
            bucket.count(step.increments)
            self.counter_names = tuple(step.increments)
        bucket.reset = bucket.reset or step.reset
        bucket.gauge(gauges)
        self.gauges, self.sampled_at = gauges, at
        return bucket

    def close(self, end: float) -> Bucket | None:
        bucket, self.open = self.open, None
        if bucket is None and self.sampled_at and end - self.sampled_at <= BRIDGE_SECONDS:
            zeros = dict.fromkeys(self.counter_names, 0.0)
            return Bucket(zeros, dict(self.gauges), {}, False)
        return bucket


@dataclass(slots=True)
class Collector:
    """Feed it samples as they come and call `close` once a second."""

    _nodes: dict[str, _Source] = field(default_factory=dict)
    _gateways: dict[str, _Source] = field(default_factory=dict)
    _pairs: dict[tuple[str, str], CounterTracker] = field(default_factory=dict)
    _node_pairs: dict[tuple[str, str], tuple[CounterTracker, HistogramTracker]] = field(
        default_factory=dict
    )
    _loads: dict[tuple[str, str], CounterTracker] = field(default_factory=dict)
    _worker_gauges: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    _data_paths: dict[str, dict[str, tuple[DataPathState, str]]] = field(default_factory=dict)
    _extra: dict[str, Bucket] = field(default_factory=dict)
    claims_total: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By node, since this control plane started: (checked, stale)."""
    sources_dropped: int = 0

    def node_sample(self, stats: PoolStats, at: float) -> None:
        """`at`: seconds since the epoch."""
        source = self._source(self._nodes, stats.node_id)
        if source is None:
            return
        started_at = stats.incarnation / 1000
        epoch = float(stats.incarnation)
        step = source.counters.step(epoch, started_at, counters_of(stats), at)
        source.take(step, gauges_of(stats), at)
        self._pair_samples(stats, at)
        self._node_pair_samples(stats, at)

    def prefill_legs(self, node_id: str, legs: Iterable[LegReport]) -> None:
        """What prefill asked the pool for, and found there: the device's own hits are not asked."""
        for leg in legs:
            if leg.kv_role != "kv_consumer":
                asked = max(0, leg.prompt_tokens - leg.device_hit_tokens)
                found = {"pool_asked_tokens": float(asked), "pool_hit_tokens": float(min(asked, leg.pool_hit_tokens))}  # fmt: skip
                self._add(f"node:{node_id}").count(found)
                self._add("cluster").count(found)

    def claims(self, node_id: str, checked: int, stale: int) -> None:
        """The auditor asked a node for blocks that the index said it holds."""
        before = self.claims_total.get(node_id, (0, 0))
        self.claims_total[node_id] = (before[0] + checked, before[1] + stale)
        increments = {"claims_checked": float(checked), "claims_stale": float(stale)}
        self._add(f"node:{node_id}").count(increments)
        self._add("cluster").count(increments)

    def _pair_samples(self, stats: PoolStats, at: float) -> None:
        for pair, num_bytes in stats.shm_bytes_by_pair.items():
            key = (stats.node_id, pair)
            if key not in self._pairs and len(self._pairs) >= MAX_PAIRS:
                self.sources_dropped += 1
                continue
            tracker = self._pairs.setdefault(key, CounterTracker())
            values = {
                "bytes": float(num_bytes),
                "seconds": stats.shm_seconds_by_pair.get(pair, 0.0),
            }
            step = self._pair_step(tracker, stats, values, at)
            if step.increments:
                self._add(f"pair:{pair}").count(step.increments)

    def _pair_step(
        self, tracker: CounterTracker, stats: PoolStats, values: dict[str, float], at: float
    ) -> Step:
        # a pair is born with its first transfer: it counts from zero once its node is known
        born = tracker.epoch is None and self._nodes[stats.node_id].counter_names != ()
        started_at = at if born else stats.incarnation / 1000
        return tracker.step(float(stats.incarnation), started_at, values, at)

    def _node_pair_samples(self, stats: PoolStats, at: float) -> None:
        """What this node's agent moved from and to others."""
        for pair, (values, counts) in node_pairs(stats).items():
            key = (stats.node_id, pair)
            if key not in self._node_pairs and len(self._node_pairs) >= MAX_PAIRS:
                self.sources_dropped += 1
                continue
            tracker, histogram = self._node_pairs.setdefault(
                key, (CounterTracker(), HistogramTracker())
            )
            step = self._pair_step(tracker, stats, values, at)
            observed = histogram.step({TRANSFER_HISTOGRAM: counts}, step)
            if step.increments and any(step.increments.values()):
                bucket = self._add(f"pair:{pair}")
                bucket.count(step.increments)
                bucket.observe(observed)

    def gateway_sample(self, gateway_id: str, stats: GatewayStats, at: float) -> None:
        source = self._source(self._gateways, gateway_id)
        if source is None:
            return
        epoch = stats.started_at.timestamp()
        values = {name: float(getattr(stats, f"{name}_total")) for name in GATEWAY_COUNTERS}
        counts = {name: list(getattr(stats, name).counts) for name in ("ttft", "tbt", "queue")}
        step = source.counters.step(epoch, epoch, values, at)
        bucket = source.take(step, {"running": float(stats.in_flight)}, at)
        bucket.observe(source.histograms.step(counts, step))
        self._worker_samples(gateway_id, stats, epoch, at)

    def _worker_samples(
        self, gateway_id: str, stats: GatewayStats, epoch: float, at: float
    ) -> None:
        gauges: dict[str, tuple[int, int]] = {}
        for worker_id, load in list(stats.workers.items())[:MAX_SOURCES]:
            gauges[worker_id] = (load.running, load.waiting)
            tracker = self._loads.setdefault((gateway_id, worker_id), CounterTracker())
            values = {
                "requests": float(load.requests_total),
                "failed": float(load.failures_total),
            }
            step = tracker.step(epoch, epoch, values, at)
            if step.increments is not None:
                self._add(f"worker:{worker_id}").count(step.increments)
        self._worker_gauges[gateway_id] = gauges
        self._data_paths[gateway_id] = {
            worker_id: (load.data_path, load.data_path_note[:500])
            for worker_id, load in stats.workers.items()
            if worker_id in gauges
        }
        for key in [key for key in self._loads if key[0] == gateway_id and key[1] not in gauges]:
            del self._loads[key]

    def kv_wait(self, worker_id: str, waited: float, decoding: float) -> None:
        """A finished decode leg: seconds that it waited for KV, and that it took in all."""
        increments = {"kv_wait_seconds": waited, "decode_seconds": decoding}
        self._add(f"worker:{worker_id}").count(increments)
        self._add("cluster").count(increments)

    def transfer(self, pair: str, seconds: float, *, failed: bool, weight: int = 1) -> None:
        """The blocks of `weight` requests went (or failed to go) from one worker to another."""
        counts = [0] * NUM_COUNTS
        counts[bucket_of(HISTOGRAM_BOUNDS_SECONDS, seconds)] = weight
        bucket = self._add(f"pair:{pair}")
        bucket.count({"transfers": float(weight), "failures": float(weight * failed)})
        bucket.observe({TRANSFER_HISTOGRAM: counts})

    def worker_load(self, worker_id: str) -> tuple[int, int] | None:
        """(running, waiting) as the gateways see it; null where none does."""
        seen = [gauges[worker_id] for gauges in self._worker_gauges.values() if worker_id in gauges]
        return (sum(s[0] for s in seen), sum(s[1] for s in seen)) if seen else None

    def data_path(self, worker_id: str) -> tuple[DataPathState, str] | None:
        """What legs met at a worker, as the gateway has it that had the worst; null where none."""
        seen = [paths[worker_id] for paths in self._data_paths.values() if worker_id in paths]
        for state in ("ejected", "trial"):
            for found in seen:
                if found[0] == state:
                    return found
        return seen[0] if seen else None

    def forget_node(self, node_id: str) -> None:
        self._nodes.pop(node_id, None)
        self.claims_total.pop(node_id, None)
        for key in [key for key in self._pairs if key[0] == node_id]:
            del self._pairs[key]
        for key in [key for key in self._node_pairs if key[0] == node_id]:
            del self._node_pairs[key]

    def gateway_lost(self, gateway_id: str) -> None:
        """What it last said of its workers is no longer so."""
        self._worker_gauges.pop(gateway_id, None)
        self._data_paths.pop(gateway_id, None)

    def forget_gateway(self, gateway_id: str) -> None:
        self.gateway_lost(gateway_id)
        self._gateways.pop(gateway_id, None)
        for key in [key for key in self._loads if key[0] == gateway_id]:
            del self._loads[key]

    def close(self, second: int) -> dict[str, Bucket]:
        """The buckets [second, second + 1) of all sources, `cluster` among them."""
        end = second + 1.0
        nodes = _closed(self._nodes, end)
        gateways = _closed(self._gateways, end)
        extra, self._extra = self._extra, {}
        cluster = extra.pop("cluster", new_bucket())
        self._sum_cluster(cluster, nodes, gateways)
        closed = {f"node:{name}": bucket for name, bucket in nodes.items()}
        closed |= {f"gateway:{name}": bucket for name, bucket in gateways.items()}
        for name in [name for name in extra if name in closed]:
            closed[name].merge(extra.pop(name))
        for worker_id in {name for gauges in self._worker_gauges.values() for name in gauges}:
            load = self.worker_load(worker_id)
            bucket = extra.setdefault(f"worker:{worker_id}", new_bucket())
            if load is not None:
                bucket.gauge({"running": load[0], "waiting": load[1]})
        closed |= extra
        if nodes or gateways or cluster.counters:
            closed["cluster"] = cluster
        return closed

    def _sum_cluster(
        self, cluster: Bucket, nodes: dict[str, Bucket], gateways: dict[str, Bucket]
    ) -> None:
        by_nodes = any(source.counters.last.get("prompt_tokens") for source in self._nodes.values())
        for bucket in gateways.values():
            left_out = TOKEN_COUNTERS if by_nodes else frozenset()
            cluster.count({k: v for k, v in bucket.counters.items() if k not in left_out})
            cluster.observe(bucket.histograms)
        for bucket in nodes.values():
            left_out = frozenset() if by_nodes else TOKEN_COUNTERS
            cluster.count({k: v for k, v in bucket.counters.items() if k not in left_out})
        sums: dict[str, float] = {}
        for bucket in nodes.values():
            for name, value in bucket.gauges.items():
                sums[name] = sums.get(name, 0.0) + value
        loads = [load for gauges in self._worker_gauges.values() for load in gauges.values()]
        if gateways:
            sums["running"] = float(sum(load[0] for load in loads))
            sums["waiting"] = float(sum(load[1] for load in loads))
        cluster.gauge(sums)
        cluster.reset = any(b.reset for b in (*nodes.values(), *gateways.values()))

    def _source(self, sources: dict[str, _Source], name: str) -> _Source | None:
        if name not in sources and len(sources) >= MAX_SOURCES:
            self.sources_dropped += 1
            return None
        return sources.setdefault(name, _Source())

    def _add(self, source: str) -> Bucket:
        if source not in self._extra and len(self._extra) >= MAX_SOURCES + MAX_PAIRS:
            self.sources_dropped += 1
            return new_bucket()
        return self._extra.setdefault(source, new_bucket())


def _closed(sources: dict[str, _Source], end: float) -> dict[str, Bucket]:
    pairs: Iterable[tuple[str, Bucket | None]] = (
        (name, source.close(end)) for name, source in sources.items()
    )
    return {name: bucket for name, bucket in pairs if bucket is not None}
